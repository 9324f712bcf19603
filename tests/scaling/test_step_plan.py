"""Memory, communication and time of a step, from hand-computed formulas."""

import json

import pytest

from tests.conftest import refused
from tests.scaling.real_step import batching_of, spec_of
from tfm_blocks.cli import main
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import count_parameters, network_without_values
from tfm_blocks.scaling.step_plan import StepSettings, card_names, plan_steps, plan_table, read_card
from tfm_blocks.scaling.step_trace import trace_step
from tfm_blocks.training.optimizer_settings import read_optimizer

H100 = read_card("h100")
SMALL = ("d_model=48", "d_ff=80", "heads=4", "layers=3", "vocab=300")


def planned(strategy="ddp", devices=(1, 8, 64), card=H100, precision="bf16"):
    spec = spec_of("base", *SMALL)
    settings = StepSettings(precision, strategy, activation_checkpointing=False)
    return spec, plan_steps(spec, batching_of(spec, 5), settings, card, list(devices))


def test_ddp_holds_all_weights_and_sends_the_gradients_almost_twice():
    spec, (one, eight, many) = planned()
    weights = 4 * count_parameters(spec)
    assert [plan.weights for plan in (one, eight, many)] == [weights] * 3
    assert [plan.sent for plan in (one, eight, many)] == [0, 2 * weights * 7 // 8, 2 * weights * 63 // 64]
    assert eight.peak == one.peak + weights  # the buckets of gradients
    assert one.optimizer == 2 * weights


def test_one_device_needs_the_traced_peak_and_the_moments():
    spec, (one, *_) = planned()
    trace = trace_step(spec, batching_of(spec, 5), device="cuda", bf16=True, recomputes=False)
    assert one.peak == trace.peak + one.optimizer
    assert one.multiply_adds == trace.multiply_adds


def test_the_optimizer_keeps_its_own_state_and_frozen_weights_have_no_gradient():
    spec, (adam, *_) = planned()
    settings = StepSettings("bf16", "ddp", activation_checkpointing=False)
    groups = {"frozen": {"where": {"node": "encoder"}, "train": False}}
    sgd = read_optimizer({"name": "sgd", "groups": groups})
    (half,) = plan_steps(spec, batching_of(spec, 5), settings, H100, [1], sgd)
    weights = network_without_values(spec).named_parameters()
    encoder = sum(weight.numel() for name, weight in weights if name.startswith("encoder."))
    assert half.optimizer == half.gradients == adam.gradients - 4 * encoder and half.weights == adam.weights
    assert half.multiply_adds < adam.multiply_adds and half.peak < adam.peak - 3 * 4 * encoder
    (plain,) = plan_steps(
        spec, batching_of(spec, 5), settings, H100, [1], read_optimizer({"name": "sgd", "momentum": 0.0})
    )
    assert plain.optimizer == 0
    assert adam.traffic - plain.traffic == pytest.approx(2 * adam.optimizer, rel=1e-4)


def test_fsdp2_shards_the_weights_and_gathers_each_layer_twice():
    spec, (one, eight, _) = planned("fsdp2")
    weights = 4 * count_parameters(spec)
    outside = 4 * 300 * 48  # the embedding, which the output shares
    assert eight.weights == weights // 8
    assert eight.sent == (2 * (weights - outside) + outside + weights) * 7 // 8
    layer = 4 * (2 * (4 * 48 * 48 + 4 * 48) + 2 * 48 * 80 + 80 + 48 + 3 * 2 * 48)  # of the decoder, the largest
    assert eight.exchange == outside + 4 * layer
    assert one.sent == one.exchange == 0


def test_the_step_takes_the_longest_of_its_times():
    _, (one, eight, many) = planned()
    assert one.arithmetic_seconds == pytest.approx(2 * one.multiply_adds / (0.4 * 989e12))
    assert one.traffic_seconds == pytest.approx(one.traffic / 3350e9)
    assert eight.communication_seconds == pytest.approx(eight.sent / 450e9)
    assert many.communication_seconds == pytest.approx(many.sent / 400e9)  # eight adapters of 50 GB/s
    for plan in (one, eight, many):
        times = plan.arithmetic_seconds, plan.traffic_seconds, plan.communication_seconds
        assert plan.step_seconds == max(times)


def test_a_card_without_figures_has_a_plan_without_times():
    _, (one, eight) = planned(card=read_card("cpu"), devices=(1, 8))
    assert one.peak > 0
    assert one.step_seconds is None and eight.communication_seconds is None


def test_a_card_can_be_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndevice: cuda\nbandwidth: 1000\nbf16: 100\nfp32: 10\nlink: 25\ncards_per_node: 2\n")
    _, (one, two) = planned(card=read_card(str(path)), devices=(1, 2))
    assert one.traffic_seconds == pytest.approx(one.traffic / 1e12)
    assert two.communication_seconds == pytest.approx(two.sent / 25e9)
    path.write_text("name: mine\ndevice: cuda\nnetwork: 12.5\n")  # no two cards share a node, so `link` is not needed
    _, (eight,) = planned(card=read_card(str(path)), devices=(8,))
    assert eight.communication_seconds == pytest.approx(eight.sent / 12.5e9)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("name: mine\ndevice: cuda\nbandwith: 1\n", "bandwith: no such setting"),
        ("name: mine\ndevice: gpu\n", "device: must be one of cpu, cuda, but is 'gpu'"),
        ("name: mine\ndevice: cuda\nmemory: 0\n", "memory: must be above 0, but is 0"),
        ("just text\n", "must be a mapping of figures"),
        ("a: [\n", r"mine: is not YAML: .*\n  --> .*mine.yaml:2"),
    ],
)
def test_a_wrong_file_of_a_card_is_refused(tmp_path, text, rule):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_card(str(path))


def test_an_unknown_card_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--card: must be a known card, but is 'h10'\n  help: did you mean h100"):
        read_card("h10")
    with pytest.raises(ConfigError, match="cannot be read: FileNotFoundError"):
        read_card(str(tmp_path / "none.yaml"))


def test_every_shipped_card_can_be_read():
    assert {read_card(name).device for name in card_names()} == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--plan", "--devices", "12"],
            "--devices: must be at most 8, the cards of a node, or a multiple of it, but is 12",
        ),
        (["--plan", "--batch-tokens", "63"], "--batch-tokens: is 63, but a row has 64 tokens"),
        (["--devices", "8"], "--devices: no effect without --plan"),
    ],
)
def test_nonsense_is_refused(options, message):
    error = refused("show", "tiny", *options)
    assert message in error and "help: " in error


def test_zero_devices_are_refused():
    assert "--devices: must be a whole number above 0" in refused("show", "tiny", "--plan", "--devices", "1,0")


def test_json_has_the_numbers_of_the_table(capsys):
    main(["show", "base", *SMALL, "--plan", "--devices", "1,8", "--batch-tokens", "320", "--json"])
    record = json.loads(capsys.readouterr().out)
    _, plans = planned(devices=(1, 8))
    assert [plan["peak"] for plan in record["plans"]] == [plan.peak for plan in plans]
    assert record["card"]["name"] == "H100 SXM"


@pytest.mark.grid
def test_settings_of_a_run_are_those_of_its_plan_unless_an_option_changes_them(capsys):
    def plan(*options):
        main(["show", "base", *SMALL, "--plan", "--json", *options])
        record = json.loads(capsys.readouterr().out)
        return [record[name] for name in ("rows", "precision", "strategy", "activation_checkpointing")], record["plans"]

    run = ["trainer.precision=fp32", "trainer.strategy=fsdp2", "data.batch_tokens=640"]
    assert plan(*run, "trainer.activation_checkpointing=true")[0] == [10, "fp32", "fsdp2", True]
    options = ["--precision", "bf16", "--strategy", "ddp", "--batch-tokens", "320"]
    chosen, (alone,) = plan(*run, *options)
    assert chosen == [5, "bf16", "ddp", False]
    _, (averaged,) = plan("trainer.ema=0.9", "--batch-tokens", "320")
    assert averaged["peak"] - alone["peak"] == averaged["weights"] - alone["weights"] == alone["weights"]


def test_the_table_has_the_traffic_of_a_card_without_its_bandwidth():
    spec, plans = planned(card=read_card("cpu"), devices=(1,))
    settings = StepSettings("bf16", "ddp", activation_checkpointing=False)
    table = plan_table("base", plans, batching_of(spec, 5), settings, read_card("cpu"))
    rows = {row[0]: row[1].value for row in table.rows if row[1] is not None}
    assert rows["memory traffic"] == plans[0].traffic / 1e9 and "communication" not in rows
