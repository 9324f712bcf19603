"""A changed block drops the arguments of the old one."""

import json
from dataclasses import replace

import pytest

from tests.conftest import expect_problem
from tfm_blocks.compose.folders import config_folders
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.run import job_record, read_job
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import check_model

PARENT = """
defaults: [tiny, _self_]
layers: 2
window: 5
model:
  args: {norm: {block: rmsnorm, eps: 1e-5}}
  graph:
    encoder: {layer: {attn: {block: restricted_attention, r: "${window}"}}}
    decoder:
      layer:
        self: {position: {block: rotary, base: 500}}
        ffn: {block: moe, experts: 4, router: {block: sigmoid_router, groups: 2, top_groups: 1}}
"""


@pytest.fixture
def check_child(tmp_path):
    """Return a function that checks a child of PARENT with overrides; the argument is its key `model`."""
    (tmp_path / "model").mkdir()

    def check(child, *overrides):
        header = "# @package _global_\n"
        (tmp_path / "model/parent.yaml").write_text(header + PARENT)
        (tmp_path / "model/child.yaml").write_text(f"{header}defaults: [parent, _self_]\n{child}\n")
        assert config_folders(tmp_path)[1] == tmp_path
        composed = compose_model("child", overrides, tmp_path)
        return check_model(composed.model, composed.sources)

    return check


def dropped(spec):
    """Return the keys in the notes of a spec, by address."""
    return {
        note.address.removeprefix("model."): note.rule.split(" take ")[1].split(", written")[0] for note in spec.notes
    }


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("model: {graph: {decoder: {layer: {self: {block: retention}}}}}", {"graph.decoder.layer.self": "mask, position"}),
        ("model: {graph: {decoder: {layer: {self: {block: retention, heads: 2}}}}}", {"graph.decoder.layer.self": "mask, position"}),
        ("model: {graph: {decoder: {layer: {ffn: {block: gated_ffn}}}}}", {"graph.decoder.layer.ffn": "experts, router"}),
        ("model: {graph: {decoder: {at: {0: {ffn: {block: gated_ffn}}}}}}", {"graph.decoder.at.0.ffn": "experts, router"}),
        ("model: {graph: {decoder: {layer: {ffn: {experts: 6}}, at: {0: {ffn: {block: gated_ffn}}}}}}", {"graph.decoder.at.0.ffn": "experts, router"}),
        ("model: {graph: {decoder: {layer: {ffn: {router: {block: biased_softmax_router}}}}}}", {}),
        ("model: {graph: {decoder: {layer: {self: {position: {block: alibi}}}}}}", {"graph.decoder.layer.self.position": "base"}),
        ("model: {args: {norm: {block: dyt}}}", {"args.norm": "eps"}),
        ("model: {graph: {encoder: {layer: {attn: {block: attention}}}}}", {"graph.encoder.layer.attn": "r"}),
        ("model: {graph: {encoder: {layer: {attn: {block: restricted_attention, heads: 2}}}}}", {}),
    ],
)  # fmt: skip
def test_a_changed_block_drops_what_the_new_block_does_not_take(check_child, child, expected):
    spec = check_child(child)
    assert dropped(spec) == expected
    assert spec.nodes == check_model(spec.mapping).nodes  # the mapping of a run folder has no places


@pytest.mark.parametrize(
    ("child", "overrides", "address"),
    [
        ("model: {graph: {decoder: {layer: {self: {block: retention, mask: causal}}}}}", (), "decoder.layer.self.mask"),
        ("model: {graph: {decoder: {at: {0: {self: {block: retention, mask: causal}}}}}}", (), "decoder.at.0.self.mask"),
        ("model: {graph: {decoder: {layer: {self: {block: retention}}}}}", ["model.graph.decoder.layer.self.mask=causal"], "decoder.layer.self.mask"),
        ("model: {graph: {decoder: {layer: {self: {block: retention, msak: causal}}}}}", (), "decoder.layer.self.msak"),
        ("model: {graph: {encoder: {layer: {attn: {block: attention}}}}}", ["window=7"], "encoder.layer.attn.r"),
        ("window: 7\nmodel: {graph: {encoder: {layer: {attn: {block: attention}}}}}", (), "encoder.layer.attn.r"),
    ],
)  # fmt: skip
def test_arguments_that_the_child_writes_are_checked(check_child, child, overrides, address):
    with expect_problem(f"model.graph.{address}", "unknown key"):
        check_child(child, *overrides)


def test_the_layers_that_at_does_not_change_keep_their_arguments(check_child):
    spec = check_child("model: {graph: {decoder: {at: {0: {ffn: {block: gated_ffn}}}}}}")
    blocks = {node.address: node for node in spec.nodes}
    assert blocks["decoder.0.ffn"].block == "gated_ffn"
    assert blocks["decoder.1.ffn"].arguments["experts"] == 4


def test_a_run_and_a_job_record_the_model_without_the_dropped_arguments(small, tmp_path):
    composed = small("model.graph.decoder.layer.self.block=retention", "data.train=4")
    run = check_run(composed)
    assert "mask" not in run.composed.model["graph"]["decoder"]["layer"]["self"]
    (tmp_path / "job.json").write_text(json.dumps(job_record(replace(composed, choices={}), {}, [])))
    job, _ = read_job(tmp_path / "job.json")
    assert check_model(job.model, job.sources).nodes == run.spec.nodes
