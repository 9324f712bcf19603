"""The ejected file computes what the model computes, in a process that cannot import the project."""

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import tests.exchange.wrong_sources
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
from tfm_blocks.registry.blocks import REGISTRY

SIZES = {"d_model": 16, "d_ff": 24, "heads": 4, "layers": 3, "vocab": 50, "r": 4}
DEFAULT = ("base", "prenorm", "rotary")
FUSED = {"t5"}  # with a learned bias of scores: on the CPU ours computes the softmax step by step
EXACT, CLOSE = {"rtol": 0, "atol": 0}, {"rtol": 1e-4, "atol": 1e-5}
ALONE = textwrap.dedent("""
    import importlib.util, sys
    sys.path = [path for path in sys.path if path not in sys.argv[2:] and path != ""]
    sys.meta_path.insert(0, type("Refuse", (), {"find_spec": staticmethod(
        lambda name, path=None, target=None: (_ for _ in ()).throw(ImportError(name)) if name.startswith("tfm_blocks") else None)}))
    import torch
    sys.path.append(sys.argv[1])
    before = set(sys.modules)
    import model
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert new <= {"model"}, new
    case = torch.load(f"{sys.argv[1]}/case.pt")
    network = model.Model()
    network.load_state_dict(case["weights"], strict=True)
    network.eval()
    logits = network(**case["inputs"])
    logits.square().sum().backward()
    grads = {name: tensor.grad for name, tensor in network.named_parameters()}
    steps = []
    if "tgt" in case["inputs"]:
        sources = {name: value for name, value in case["inputs"].items() if name != "tgt"}
        with torch.no_grad():
            state = network.start(**sources, **({} if sources else {"rows": 3}), length=6)
            steps = [network.step(ids_B, state) for ids_B in case["inputs"]["tgt"].T]
    torch.save({"logits": logits.detach(), "grads": grads, "steps": steps}, f"{sys.argv[1]}/result.pt")
""")


def spec_of(name):
    """A shipped model in small sizes; of these it takes the knobs that it has."""
    knobs = {knob for model in describe_models(None) if model.name == name for knob in model.knobs}
    composed = compose_model(name, [f"{key}={value}" for key, value in SIZES.items() if key in knobs])
    return check_model(composed.model, composed.sources)


def trained(spec):
    """A network whose parameters have moved away from their initial values, such as gains of 0."""
    network = build_network(spec, seed=1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return network


def run_alone(text, folder, network, inputs):
    """The results of the ejected file in a process where tfm_blocks cannot be imported."""
    (folder / "model.py").write_text(text, "utf-8")
    torch.save({"weights": network.state_dict(), "inputs": inputs}, folder / "case.pt")
    done = subprocess.run([sys.executable, "-I", "-c", ALONE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


def agrees(spec, folder, *, exact=True):
    network = trained(spec)
    inputs = inputs_of(network)
    result = run_alone(eject(spec, Sources(), "test"), folder, network, inputs)
    logits = network(**inputs)
    logits.square().sum().backward()
    tolerance = EXACT if exact else CLOSE
    torch.testing.assert_close(result["logits"], logits.detach(), **tolerance)
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(result["grads"][name], parameter.grad, **tolerance, msg=name)
    if result["steps"]:
        decodes_alike(network, inputs, result["steps"])


@torch.no_grad()
def decodes_alike(network, inputs, steps):
    decoding = incremental.start(network, sources_of(inputs), 6, sentences=3)
    for ids_B, step_BV in zip(inputs[TARGET].T, steps, strict=True):
        x_BD, decoding = incremental.step(network, ids_B, decoding)
        torch.testing.assert_close(step_BV, network.head(x_BD), **CLOSE)


def marked():
    names = [model.name for model in describe_models(None)]
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.grid) for name in names]


@pytest.mark.parametrize("name", marked())
def test_a_shipped_model_has_equal_logits_gradients_and_steps(name, tmp_path):
    agrees(spec_of(name), tmp_path, exact=name not in FUSED)


@pytest.mark.grid
def test_random_models_have_equal_logits_gradients_and_steps(tmp_path):
    REGISTRY.blocks.update(PLUGGED)
    checked = []

    @settings(
        max_examples=150,
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
        agrees_here(spec)
        checked.append(spec)

    try:
        compare()
    finally:
        for name in PLUGGED:
            del REGISTRY.blocks[name]
    assert len(checked) >= 100


def agrees_here(spec):
    """The same in this process, which spares a start of Python for each of many models."""
    network = trained(spec)
    inputs, names = inputs_of(network), {}
    exec(compile(eject(spec, Sources(), "test"), "model.py", "exec"), names)
    ejected = names["Model"]().eval()
    ejected.load_state_dict(network.state_dict(), strict=True)
    torch.testing.assert_close(ejected(**inputs), network(**inputs), **CLOSE)
    if TARGET in inputs:
        with torch.no_grad():
            sources = sources_of(inputs)
            state = ejected.start(**sources, **({} if sources else {"rows": 3}), length=6)
            decodes_alike(network, inputs, [ejected.step(ids_B, state) for ids_B in inputs[TARGET].T])


def test_padding_does_not_change_the_logits_of_other_positions(tmp_path):
    spec = spec_of("base")
    network = trained(spec)
    inputs = inputs_of(network)
    inputs["src"][1, 3:] = inputs["tgt"][2, 4:] = 0
    result = run_alone(eject(spec, Sources(), "test"), tmp_path, network, inputs)
    keep_BT = inputs["tgt"] != 0
    torch.testing.assert_close(result["logits"][keep_BT], network(**inputs).detach()[keep_BT], **CLOSE)


def test_the_base_model_is_short_and_has_no_trace_of_other_blocks():
    spec = check_model(compose_model("base", []).model)
    text = eject(spec, Sources(), "base")
    code = text.split('"""', 2)[2]
    assert len(text.splitlines()) <= 300
    assert not any(word in code for word in ("rotat", "kv_heads", "qk_norm", "gate", "clamp", "tfm"))


def test_the_file_is_formatted_and_has_no_unused_name(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(eject(spec_of("rotary"), Sources(), "rotary"), "utf-8")
    command = ["ruff", "check", "--isolated", "--select", "F,E7,E9,I", str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == "All checks passed!\n"
    assert (
        subprocess.run(
            ["ruff", "format", "--isolated", "--line-length", "120", "--check", str(path)], check=False
        ).returncode
        == 0
    )


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


def test_a_block_whose_source_is_not_covered_is_refused_by_node():
    name = tests.exchange.wrong_sources.NAME
    inputs, args = {"src": "B S"}, {"d_model": 8, "vocab": 11}
    graph = {"emb": {"block": "embedding", "in": "src"}, "odd": {"block": name}, "logits": {"block": "unembed"}}
    try:
        spec = check_model({"inputs": inputs, "args": args, "add_norm": "none", "graph": graph})
        with pytest.raises(ConfigError, match="model.graph.odd: cannot be ejected: While statements are not covered"):
            eject(spec, Sources(), "test")
    finally:
        del REGISTRY.blocks[name]
