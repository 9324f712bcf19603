"""The ejected file gives the outputs of the model, in a process that cannot import the project."""

import subprocess
import sys
import textwrap
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import tests.exchange.wrong_sources
from tests.network.examples import SHIPPED, TESTS, build
from tests.network.random_graphs import models
from tests.network.test_random_graphs import inputs_of, sources_of
from tests.plugged import PLUGGED
from tfm_blocks.cli import main
from tfm_blocks.compose.comments import describe_models
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.eject.file import eject
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network import incremental
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY

SIZES = {"d_model": 16, "d_ff": 24, "heads": 4, "layers": 3, "vocab": 50, "r": 4}
DEFAULT = ("base", "prenorm", "rotary")
POOLED = "bert_classifier"  # whose pooling reads the first position alone
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALONE = textwrap.dedent("""
    import importlib.util, sys, torch
    from pathlib import Path

    class Refuse:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] in ("tfm_blocks", "tests"):
                raise ImportError(name)

    sys.meta_path.insert(0, Refuse)
    for folder in Path(sys.argv[1]).iterdir():
        case = torch.load(folder / "case.pt")
        torch.set_num_threads(case["threads"])
        before = set(sys.modules)
        spec = importlib.util.spec_from_file_location("model", folder / "model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert set(sys.modules) <= before, set(sys.modules) - before
        network = module.Model().eval()
        network.load_state_dict(case["weights"], strict=True)
        logits = network(**case["inputs"])
        logits.square().sum().backward()
        steps = []
        if "tgt" in case["inputs"]:
            sources = {name: value for name, value in case["inputs"].items() if name != "tgt"}
            with torch.no_grad():
                state = network.start(**sources, **({} if sources else {"rows": 3}), length=6)
                steps = [network.step(ids_B, state) for ids_B in case["inputs"]["tgt"].T]
        grads = {name: tensor.grad for name, tensor in network.named_parameters()}
        torch.save({"logits": logits.detach(), "grads": grads, "steps": steps}, folder / "result.pt")
""")


@cache
def entries():
    """Return the shipped models by name."""
    shipped = {path.stem for path in SHIPPED}
    return {entry.name: entry for entry in describe_models(None) if entry.name in shipped}


def knobs_of(name):
    """Return the knobs of a shipped model and of its parents."""
    entry = entries()[name]
    own = {knob.partition("=")[0] for knob in entry.knobs}
    return own.union(*map(knobs_of, entry.parents))


def spec_of(name):
    """Return the spec of a shipped model, with each small size whose knob it has."""
    knobs = knobs_of(name)
    composed = compose_model(name, [f"{key}={value}" for key, value in SIZES.items() if key in knobs])
    return check_model(composed.model, composed.sources)


def trained(spec):
    """Return a network whose parameters differ from their initial values, such as gains of 0."""
    network = build_network(spec, seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return network


def eject_alone(cases, folder):
    """Return the results of ejected files by name, computed in a process that cannot import the project."""
    for name, (spec, network, inputs) in cases.items():
        case = folder / name
        case.mkdir()
        (case / "model.py").write_text(eject(spec, Sources(), name), "utf-8")
        content = {"weights": network.state_dict(), "inputs": inputs, "threads": torch.get_num_threads()}
        torch.save(content, case / "case.pt")
    command = [sys.executable, "-I", "-c", ALONE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: torch.load(folder / name / "result.pt") for name in cases}


def nearly_equal(ejected, ours):
    """Return True if the difference is rounding: float32 gradients of gemma2 differ from float64 by 6e-6 of the largest."""
    finite = ours.isfinite()  # ids without a row have logits of -inf
    near = (ejected - ours)[finite].abs().max() <= 1e-4 * ours[finite].abs().max()
    return near and torch.equal(ejected[~finite], ours[~finite])


def agree(names, folder, equal):
    """Compare logits, gradients and steps of shipped models with those of their ejected files."""
    cases = {}
    for name in names:
        network = trained(spec_of(name))
        cases[name] = (network.spec, network, inputs_of(network))
    for name, result in eject_alone(cases, folder).items():
        _, network, inputs = cases[name]
        logits = network(**inputs)
        logits.square().sum().backward()
        assert equal(result["logits"], logits.detach()), name
        for address, parameter in network.named_parameters():
            if parameter.grad is not None:
                assert equal(result["grads"][address], parameter.grad), (name, address)
        if result["steps"]:
            decodes_alike(network, inputs, result["steps"])


@torch.no_grad()
def decodes_alike(network, inputs, steps):
    decoding = incremental.start(network, sources_of(inputs), 6, sentences=3)
    for ids_B, step_BV in zip(inputs[TARGET].T, steps, strict=True):
        x_BD, decoding = incremental.step(network, ids_B, decoding)
        torch.testing.assert_close(step_BV, network.head(x_BD), **CLOSE)


@pytest.mark.grid
def test_three_shipped_models_have_equal_logits_gradients_and_steps(tmp_path):
    agree(DEFAULT, tmp_path, torch.equal)


@pytest.mark.grid
def test_all_other_shipped_models_have_equal_logits_gradients_and_steps(tmp_path):
    """Compare within rounding: some CPUs add in another order from one process to the next."""
    agree([name for name in entries() if name not in (*DEFAULT, POOLED)], tmp_path, nearly_equal)


def test_a_block_that_does_not_read_its_mask_has_equal_logits_and_gradients():
    agree_in_process(spec_of(POOLED))


def small(inputs, graph):
    """Return the spec of a small graph."""
    args = {"d_model": 8, "heads": 2, "vocab": 11}
    return check_model({"inputs": inputs, "args": args, "add_norm": "post", "graph": graph})


def test_concatenated_sources_have_equal_logits_gradients_and_steps():
    graph = {
        "one": {"block": "embedding", "in": "src"},
        "two": {"block": "embedding", "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "mixed": {"block": "attention", "position": "rotary"},
        "emb": {"block": "embedding", "in": "tgt"},
        "self": {"block": "attention", "mask": "causal"},
        "cross": {"block": "attention", "kv": "mixed"},
        "logits": {"block": "unembed"},
    }
    agree_in_process(small({"src": "B S", "doc": "B P", "tgt": "B T"}, graph))


@pytest.mark.parametrize("drop", [{}, {"drop": {"block": "drop_tokens", "tokens": 3}}])
def test_changed_positions_have_equal_logits_gradients_and_steps(drop):
    graph = {
        "src_emb": {"block": "embedding", "in": "src"},
        "down": {"block": "strided_convolution", "kernel_size": 3, "stride": 2, "d_out": 8},
        "mem": {"block": "learned_tokens", "tokens": 3},
        "mixed": {"block": "attention", "position": "rotary"},
        **drop,
        "emb": {"block": "embedding", "in": "tgt"},
        "self": {"block": "attention", "mask": "causal"},
        "cross": {"block": "attention", "kv": "drop" if drop else "mixed"},
        "logits": {"block": "unembed"},
    }
    agree_in_process(small({"src": "B S", "tgt": "B T"}, graph))


def test_grouped_norms_and_copies_without_weights_have_equal_logits_gradients_and_steps():
    copies = {"layer": {"kept": {"block": "none"}, "map": {"block": "linear", "d_out": 8}}, "at": {0: {"map": None}}}
    graph = {
        "emb": {"block": "embedding", "in": "tgt"},
        "normed": {"block": "rmsnorm", "groups": 2},
        "copied": {"repeat": 3, "join": "sum", **copies},
        "logits": {"block": "unembed"},
    }
    agree_in_process(small({"tgt": "B T"}, graph))


@pytest.mark.grid
def test_shared_layers_whose_blocks_without_weights_differ_have_equal_logits_gradients_and_steps():
    layer = {"time": {"block": "timestep", "step": "i+1"}, "self": {"block": "attention", "mask": "causal"}}
    graph = {
        "emb": {"block": "embedding", "in": "tgt"},
        "body": {"repeat": {"times": 2, "share": True}, "layer": layer},
        "logits": {"block": "unembed"},
    }
    agree_in_process(small({"tgt": "B T"}, graph))


OTHERS = [
    ("residual_scores", {}),
    ("top_blocks", {}),
    ("segments", {}),
    pytest.param("hyper_connections", {"kind": "manifold"}, marks=pytest.mark.grid),
    pytest.param("ternary", {"activations": "int8"}, marks=pytest.mark.grid),
    *(
        pytest.param(name, {}, marks=pytest.mark.grid)
        for name in (
            "hyper_connections",
            "routed_updates",
            "native_sparse",
            "alternating_updates",
            "delta_product",
            "halting",
            "hashed_experts",
            "kimi_delta",
            "lightning",
            "mlstm",
            "rwkv7",
            "rwkv7_values",
            "attention_residuals",
            "adaptive",
            "ngrams",
            "kv_sharing",
        )
    ),
]


@pytest.mark.parametrize("name, knobs", OTHERS)
def test_other_models_have_equal_logits_gradients_and_steps(name, knobs):
    agree_in_process(build(next(path for path in TESTS if path.stem == name), **knobs).spec)


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name, info in REGISTRY.blocks.items() if info.shipped])
def test_every_shipped_block_can_be_ejected(name):
    for case in cases_of(REGISTRY.blocks[name]):
        for spec in (case.spec, *([case.decoder.spec] if case.decoder else [])):
            eject(spec, Sources(), name)


NAMES = (
    "None", "class", "step", "start", "encode", "ﬁ", "position", "rows", "like", "True", "import", "length", "state", "x",
    "self", "torch", "F", "nn", "len", "keep_BT", "keep_BS", "Model", "Node", "Tensor", "Any", "getattr", "super", "int",
    "match", "lambda", "Ⅷ", "ª", "y", "weight", "list", "zip", "tgt_B", "step2", "position2",
)  # fmt: skip


def named(name):
    """Return graphs with a node of this name: before the logits, in an encoder, a stack of layers, and in a layer."""
    attention = {"block": "attention", "mask": "causal"}
    begin, end = {"emb": {"block": "embedding", "in": "tgt"}}, {"logits": {"block": "unembed"}}
    yield {**begin, name: attention, **end}
    yield {**begin, name: {"repeat": 2, "layer": {"a": attention}}, **end}
    yield {**begin, "stack": {"repeat": 2, "layer": {name: attention, "f": {"block": "ffn", "d_ff": 12}}}, **end}
    source = {"src_emb": {"block": "embedding", "in": "src"}, name: {"block": "attention"}}
    yield {**source, **begin, "self_": attention, "cross": {"block": "attention", "kv": name}, **end}


@pytest.mark.grid
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.grid] * (i > 5)) for i, n in enumerate(NAMES)])
def test_any_name_of_a_node_can_be_ejected(name):
    for graph in named(name):
        agree_in_process(small({**({"src": "B S"} if "src_emb" in graph else {}), "tgt": "B T"}, graph))


@pytest.mark.slow
def test_random_models_have_equal_logits_gradients_and_steps():
    REGISTRY.blocks.update(PLUGGED)
    checked = []

    @settings(
        max_examples=160,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(models())
    def compare(model):
        try:
            spec = check_model(model)
        except ConfigError:
            return
        try:
            agree_in_process(spec)
        except ConfigError as error:
            assert "cannot be ejected" in str(error)
            return
        checked.append(spec)

    try:
        compare()
    finally:
        for name in PLUGGED:
            del REGISTRY.blocks[name]
    assert len(checked) >= 100


def loaded_in_process(spec, network):
    """Import the ejected file in this process; return its model with the weights of the network."""
    names = {}
    exec(compile(eject(spec, Sources(), "test"), "model.py", "exec"), names)
    ejected = names["Model"]().eval()
    ejected.load_state_dict(network.state_dict(), strict=True)
    return ejected


def agree_in_process(spec):
    """Compare a model with its ejected file in this process, which avoids a Python start per model."""
    network = trained(spec)
    inputs, ejected = inputs_of(network), loaded_in_process(spec, network)
    for model in (ejected, network):
        model(**inputs).square().sum().backward()
    gradients = dict(ejected.named_parameters())
    for address, parameter in network.named_parameters():
        if parameter.grad is not None:
            assert nearly_equal(gradients[address].grad, parameter.grad), address
    torch.testing.assert_close(ejected(**inputs), network(**inputs), **CLOSE)
    if TARGET in inputs:
        with torch.no_grad():
            sources = sources_of(inputs)
            state = ejected.start(**sources, **({} if sources else {"rows": 3}), length=6)
            decodes_alike(network, inputs, [ejected.step(ids_B, state) for ids_B in inputs[TARGET].T])


@pytest.mark.grid
def test_padding_does_not_change_the_logits_of_other_positions():
    spec = spec_of("base")
    network = trained(spec)
    inputs = inputs_of(network)
    inputs["src"][1, 3:] = inputs["tgt"][2, 4:] = 0
    ejected = loaded_in_process(spec, network)
    keep_BT = inputs["tgt"] != 0
    torch.testing.assert_close(ejected(**inputs)[keep_BT], network(**inputs)[keep_BT], **CLOSE)


@pytest.mark.grid
def test_the_base_model_is_short_and_has_no_trace_of_other_blocks():
    spec = check_model(compose_model("base", []).model)
    text = eject(spec, Sources(), "base")
    code = text.split('"""', 2)[2]
    assert len(text.splitlines()) <= 300
    assert not any(word in code for word in ("kv_heads", "qk_norm", "dilation", "clamp", "Part(", "tfm_blocks"))


@pytest.mark.grid
def test_the_file_is_formatted_and_has_no_unused_name(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(eject(spec_of("rotary"), Sources(), "rotary"), "utf-8")
    for command in ("check --isolated --select F,E7,E9,I", "format --isolated --line-length 120 --check"):
        subprocess.run(["ruff", *command.split(), str(path)], check=True)


def test_quotes_in_a_model_file_stay_in_the_docstring():
    model = dict(compose_model("base", ["layers=1", "d_model=16", "vocab=20"]).model)
    title = 'x""" + print(1) + """\\'
    names = {}
    exec(compile(eject(check_model(model), Sources(), title), "model.py", "exec"), names)
    assert names["__doc__"].startswith(title)


def test_the_command_writes_the_file_and_the_weights(tmp_path, capsys):
    options = [f"{key}={value}" for key, value in SIZES.items() if key != "r"]
    main(["eject", "base", *options, "-o", str(tmp_path / "model.py"), "--weights", str(tmp_path / "model.pt")])
    assert "model.py:" in capsys.readouterr().out
    names = {}
    exec((tmp_path / "model.py").read_text("utf-8"), names)
    names["Model"]().load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)


def test_the_model_and_the_weights_need_two_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["eject", "tiny", "-o", str(tmp_path / "model"), "--weights", str(tmp_path / "." / "model")])
    assert left.value.code == 2 and "--weights: must differ from the file of -o" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_block_whose_source_is_not_covered_is_refused_by_node():
    name = tests.exchange.wrong_sources.NAME
    graph = {"emb": {"block": "embedding", "in": "src"}, "odd": {"block": name}, "logits": {"block": "unembed"}}
    try:
        args = {"d_model": 8, "vocab": 11}
        spec = check_model({"inputs": {"src": "B S"}, "args": args, "add_norm": "none", "graph": graph})
        with pytest.raises(ConfigError, match="While statements are not supported"):
            eject(spec, Sources(), "test")
    finally:
        del REGISTRY.blocks[name]
