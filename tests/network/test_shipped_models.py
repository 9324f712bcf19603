"""Further properties of the models of conf/model/: their sizes, and their differences."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tfm_blocks as tfm
from tests.network.examples import SHIPPED, build, each, inputs_of
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model, network_without_values

SMALL = ["d_model=16", "d_ff=24", "vocab=30", "dropout=0"]
NO_TARGET = [f"model.{one}=null" for one in ("inputs.tgt", "graph.tgt_emb", "graph.tgt_pos", "graph.decoder")]

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def composed(model, *overrides):
    """Return the spec of a model with overrides."""
    config = compose_model(model, list(overrides))
    return check_model(config.model, config.sources)


def test_the_page_of_models_lists_each_of_them_once():
    listed = re.findall(r"^\| \[(\w+)\]\(\.\./conf/model/\1\.yaml\)", DOCS.read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [path.stem for path in SHIPPED]


@pytest.mark.grid
@each(SHIPPED)
def test_at_its_own_size_every_parameter_gets_a_gradient_and_nothing_is_allocated(path):
    network = network_without_values(composed(str(path)))
    with torch.device("meta"):
        inputs = {one.name: torch.zeros(2, 5, dtype=torch.int64) for one in network.spec.inputs}
        x_BTD, losses = network.trunk_with_losses(inputs)
        sum(one.sum() for one in (network.head(x_BTD), *losses.values())).backward()
    parameters = dict(network.named_parameters())
    assert sum(one.numel() for one in parameters.values()) > 5e5
    assert all(one.is_meta and one.grad is not None for one in parameters.values())


@pytest.mark.grid
@each(SHIPPED, default={"prenorm", "decoder_only"})
def test_it_learns_one_batch_by_heart(path):
    network = build(path)
    inputs = inputs_of(network)
    rows, positions, outputs = network(**inputs).shape
    pooled = outputs < 30  # a classifier: one label for all positions of a row
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1 if pooled else 4, outputs, (rows, positions), generator=generator)
    labels = drawn[:, :1].expand(-1, positions) if pooled else drawn
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(1200):  # of which most models need less than 200
        loss = F.cross_entropy(network(**inputs).flatten(0, 1), labels.flatten())
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")


@torch.no_grad()
def test_restricted_attention_with_room_for_all_is_base():
    sizes = {"layers": 2, "d_model": 16, "d_ff": 24, "heads": 2, "vocab": 30}
    base, restricted = (
        tfm.build(one, **sizes, **options).eval() for one, options in (("base", {}), ("restricted", {"r": 14}))
    )
    torch.testing.assert_close(restricted(**inputs_of(base)), base(**inputs_of(base)))


REACH = {"restricted": (["r=5", "heads=2"], 2), "conv": (["kernel_size=3"], 1)}


@pytest.mark.parametrize("model", REACH)
@torch.no_grad()
def test_nothing_beyond_depth_times_radius_has_an_influence(model):
    """Each layer of the encoder extends the visible range by its radius on both sides."""
    overrides, radius = REACH[model]
    network = build_network(composed(model, *SMALL, *overrides, "layers=3", *NO_TARGET), seed=1).eval()
    src_BS = torch.randint(4, 30, (1, 25), generator=torch.Generator().manual_seed(0))
    other_BS = src_BS.clone()
    other_BS[:, 12] = 4 + (other_BS[:, 12] - 3) % 26
    moved = (network(src=src_BS) - network(src=other_BS)).abs().amax((0, 2)) > 0
    assert moved.nonzero()[:, 0].tolist() == list(range(12 - 3 * radius, 12 + 3 * radius + 1))


@pytest.mark.parametrize(
    "model, dropped",
    [
        ("bart", {"pos": False, "norm": True}),
        ("blenderbot", {"pos": True}),
        ("t5_v1", {"drop": True}),
    ],
)
def test_dropout_is_where_the_paper_has_it(model, dropped):
    """BART drops the normalised embeddings, Blenderbot the embeddings, T5 the input and the output of each stack."""
    nodes = {node.address: node for node in composed(model, "layers=1", "dropout=0.1").nodes}
    for stack, first, side in (("encoder", "attn", "src"), ("decoder", "self", "tgt")):
        read = nodes[f"{stack}.0.{first}"].entry
        assert read == f"{side}_{list(dropped)[-1]}"
        for name, drops in dropped.items():
            node = nodes[f"{side}_{name}"]
            rates = [step.value for step in node.post if step.kind == "dropout"]
            assert any([node.arguments.get("dropout"), *rates]) is drops
    if model == "t5_v1":
        kinds = [[step.kind for step in nodes[f"{stack}.last"].post] for stack in ("encoder", "decoder")]
        assert kinds == [["norm", "dropout"], ["norm", "dropout", "scale"]]
