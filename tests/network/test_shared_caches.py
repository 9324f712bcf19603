"""Layers that store the same keys and values share caches, and their steps equal the forward pass."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.network.examples import TESTS, inputs_of
from tests.network.small import network
from tfm_blocks.blocks.shared_attention import SharedAttention
from tfm_blocks.compose.model import compose_model
from tfm_blocks.exchange.onnx.tracing import StateLayout
from tfm_blocks.network import incremental
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract.expectations import expect_steps
from tfm_blocks.network.cost import decoding_state
from tfm_blocks.registry.blocks import REGISTRY, block

YOCO = next(path for path in TESTS if path.stem == "kv_sharing")
LENGTH, WIDTH, VOCAB = 6, 8, 11
NORM, FIXED_NORM = ({"qk_norm": {"block": name}} for name in ("rmsnorm", "plain_rmsnorm"))


def scattered(net):
    """Change all weights, so that no two norms are equal."""
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


def two_layers(first, second, inputs=(), **nodes):
    """Return a network whose second attention reads the nodes that the first attention reads."""
    read = {"k": "key", "v": "value"}
    attention = {**read, "block": "shared_attention", "mask": "causal", "position": "rotary"}
    graph = {
        "emb": {"block": "embedding", "in": "tgt"},
        **nodes,
        "key": {"block": "linear", "d_out": WIDTH},
        "value": {"block": "linear", "in": "emb", "d_out": WIDTH},
        "one": {**attention, "in": "value", **first},
        "two": {**(read if "same" in second else attention), "in": "one", **second},
        "logits": {"block": "unembed"},
    }
    return scattered(network({**dict(inputs), "tgt": "B T"}, graph, add_norm="pre"))


def caches_of(decoding):
    """Return the names of the calls with caches, grouped by cache."""
    owners = {}
    for address, state in decoding.states.items():
        for tensor in state.caches.values():
            owners.setdefault(tensor.data_ptr(), []).append(address)
    return sorted(owners.values())


SHARED = {
    "equal layers": ({}, {}),
    "a default that is written": ({}, {"position": {"block": "rotary", "base": 10000}}),
    "other queries and outputs": ({}, {"gate": "sigmoid_gate", "scores": "sigmoid_scores", "bias": False}),
    "windows": ({"block": "restricted_shared_attention", "r": 2}, {"block": "restricted_shared_attention", "r": 4}),
    "a window and all": ({"block": "restricted_shared_attention", "r": 2}, {}),
    "learned biases of scores": ({"position": {"block": "relative_bias"}}, {"position": {"block": "relative_bias"}}),
    "a bias and no position": ({"position": {"block": "relative_bias"}}, {"position": None}),
    "norms without weights": ({**FIXED_NORM, "v_norm": "plain_rmsnorm"}, {**FIXED_NORM, "v_norm": "plain_rmsnorm"}),
    "norms of queries": ({**NORM, "qk_norm_kind": "queries"}, {"qk_norm": "layernorm", "qk_norm_kind": "queries"}),
    "a norm of queries and none": ({**NORM, "qk_norm_kind": "queries"}, {}),
}
SEPARATE = {
    "bases of positions": ({}, {"position": {"block": "rotary", "base": 100}}),
    "one position": ({}, {"position": None}),
    "weights of norms": (NORM, NORM),
    "weights of norms of values": ({"v_norm": "rmsnorm"}, {"v_norm": "rmsnorm"}),
    "gains of heads": ({**FIXED_NORM, "qk_norm_kind": "head_gains"}, {**FIXED_NORM, "qk_norm_kind": "head_gains"}),
    "arguments of norms": (FIXED_NORM, {"qk_norm": {"block": "plain_rmsnorm", "eps": 0.5}}),
    "one norm": (FIXED_NORM, {}),
    "norms of keys and of values": (FIXED_NORM, {"v_norm": "plain_rmsnorm"}),
    "kinds of norms": (FIXED_NORM, {**FIXED_NORM, "qk_norm_kind": "joint"}),
    "clamped keys": ({"clip_qkv": 0.3}, {}),
    "heads": ({}, {"kv_heads": 1}),
    "values": ({}, {"v": "key"}),
    "exchanged ports": ({}, {"k": "value", "v": "key"}),
}


@pytest.mark.parametrize(
    ("layers", "caches"),
    [*((layers, 1) for layers in SHARED.values()), *((layers, 2) for layers in SEPARATE.values())],
    ids=[*SHARED, *SEPARATE],
)
@torch.no_grad()
def test_layers_share_the_keys_and_values_that_they_store_alike(layers, caches):
    net = two_layers(*layers)
    decoding = incremental.start(net, {}, LENGTH, sentences=3)
    assert len(caches_of(decoding)) == 2 * caches  # keys and values
    expect_steps(net, {"tgt": torch.randint(1, VOCAB, (3, LENGTH))}, (0, 3))


@torch.no_grad()
def test_calls_of_one_module_share_caches_also_with_weights_in_norms():
    net = two_layers(NORM, {"same": "one"})
    assert len(caches_of(incremental.start(net, {}, LENGTH, sentences=3))) == 2
    expect_steps(net, {"tgt": torch.randint(1, VOCAB, (3, LENGTH))}, (0, 3))


DECLARED = {"branch": True, "sees": {"k": "mask", "v": "mask"}, "source": "a test"}


@pytest.fixture
def others(monkeypatch):
    """Declare subclasses that store something else: shifted keys, keys in another place, and keys that are doubled."""
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))

    @block("shifted_attention", "x: B T D, k: B T E, v: B T F -> B T D", **DECLARED)
    class ShiftedAttention(SharedAttention):
        """Attention whose keys depend on a weight of the layer."""

        def keys(self, k_BGSK, span_S):
            return super().keys(k_BGSK + self.out.bias[0], span_S)

    @block("exchanged_attention", "x: B T D, v: B T F, k: B T E -> B T D", **DECLARED)
    class ExchangedAttention(SharedAttention):
        """Attention whose ports have another order."""

        describe_caches = SharedAttention.describe_caches

        def __init__(self, D: int, F: int, E: int, **options: Any) -> None:
            super().__init__(D, E, F, **options)

        def forward(self, x_BTD, v_BTF, k_BTE, *, keep_BT, right_padded_T=True):
            return super().forward(x_BTD, k_BTE, v_BTF, keep_BT=keep_BT, right_padded_T=right_padded_T)

    @block("plain_attention", "x: B T D, k: B T E, v: B T F -> B T D", **DECLARED)
    class PlainAttention(SharedAttention):
        """Attention with a shorter text."""

        def describe_caches(self) -> str:
            return str(self.widths)

    @block("doubled_attention", "x: B T D, k: B T E, v: B T F -> B T D", **DECLARED)
    class DoubledAttention(SharedAttention):
        """Attention with the same text and doubled keys."""

        def keys(self, k_BGSK, span_S):
            return 2 * super().keys(k_BGSK, span_S)

        def describe_caches(self) -> str:
            return str(self.widths)


@pytest.mark.parametrize(
    "layers",
    [
        ({"block": "shifted_attention"}, {"block": "shifted_attention"}),
        ({}, {"block": "exchanged_attention", "k": "value", "v": "key"}),
        ({"block": "plain_attention", "position": None}, {"block": "doubled_attention", "position": None}),
    ],
    ids=["no text", "ports in another order", "equal texts of two classes"],
)
@torch.no_grad()
def test_classes_that_store_something_else_have_separate_caches(others, layers):
    net = two_layers(*layers)
    assert len(caches_of(incremental.start(net, {}, LENGTH, sentences=3))) == 4
    expect_steps(net, {"tgt": torch.randint(1, VOCAB, (3, LENGTH))}, (0, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda attention: setattr(attention.k_norm, "eps", 0.5),
        lambda attention: setattr(attention.position, "base", 100.0),
        lambda attention: setattr(attention, "k_norm", nn.Identity()),
    ],
    ids=["an argument of a norm", "the base of a position", "another norm"],
)
@torch.no_grad()
def test_a_layer_that_is_changed_after_it_is_built_has_separate_caches(change):
    net = two_layers(FIXED_NORM, FIXED_NORM)
    change(next(call.block for call in net.output_calls if call.address == "two"))
    assert len(caches_of(incremental.start(net, {}, LENGTH, sentences=3))) == 4
    expect_steps(net, {"tgt": torch.randint(1, VOCAB, (3, LENGTH))}, (0, 3))


@torch.no_grad()
def test_caches_are_started_without_a_hook_on_the_weights_which_fsdp2_uses_to_shard_again():
    net = two_layers(NORM, NORM)
    called = []
    for module in net.modules():
        module.register_state_dict_pre_hook(lambda *_: called.append(1))
    incremental.start(net, {}, LENGTH, sentences=3)
    assert not called


class Allocations(TorchDispatchMode):
    """Counts the elements that are allocated uninitialised."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default:
            self.elements += result.numel()
        return result


@pytest.mark.parametrize(("layers", "length"), [(3, 6), (2, 9)])
@torch.no_grad()
def test_yoco_keeps_and_allocates_one_cache_for_each_layer_with_its_own_keys(layers, length):
    composed = compose_model(str(YOCO), ["d_model=16", "d_ff=8", "heads=2", "vocab=30", f"layers={layers}"])
    net = build_network(check_model(composed.model, composed.sources), seed=1).eval()
    attentions = [call for call in net.output_calls if isinstance(call.block, SharedAttention)]
    assert len(attentions) == 2 * layers
    with Allocations() as allocated:
        decoding = incremental.start(net, {}, length, sentences=3)
    kept = layers * 2 * 16 * length
    assert allocated.elements == 3 * kept
    assert sum(len(readers) > 1 for readers in caches_of(decoding)) == 2
    assert decoding_state(net.to("meta"), {"T": length}) == kept
    each_its_own = sum(state.numel() for one in decoding.states.values() for state in one.caches.values())
    assert each_its_own == 3 * 2 * kept


@pytest.mark.parametrize(("layers", "shared"), [(10, 5), (12, 4)])
def test_gemma_3n_keeps_one_cache_for_each_layer_with_its_own_keys(layers, shared):
    sizes = ["d_model=16", "heads=2", "kv_heads=1", "d_head=4", "vocab=30", "d_ff=8"]
    composed = compose_model("gemma3n", [*sizes, f"layers={layers}", f"kv_shared={shared}"])
    net = build_network(check_model(composed.model, composed.sources), seed=1).eval()
    with torch.no_grad():
        decoding = incremental.start(net, {}, LENGTH, sentences=2)
        expect_steps(net, inputs_of(net), (0, 3))
    assert len(caches_of(decoding)) == 2 * (layers - shared)
    assert decoding_state(net.to("meta"), {"T": LENGTH}) == (layers - shared) * 2 * 4 * LENGTH


@torch.no_grad()
def test_a_search_over_padded_sources_moves_each_cache_once():
    source = {
        "src_emb": {"block": "embedding", "in": "src"},
        "read": {"block": "attention", "in": "emb", "kv": "src_emb", "position": None},
    }
    net = two_layers({}, {"gate": "sigmoid_gate"}, {"src": "B S"}, **source)
    src_BS = torch.tensor([[4, 5, 6, 7], [5, 9, 0, 0], [3, 0, 0, 0]])
    tgt_BMT = torch.randint(1, VOCAB, (3, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    tgt_BMT[:, :, :2] = tgt_BMT[:, :1, :2]
    decoding = incremental.start(net, {"src": src_BS}, LENGTH)
    _, decoding = incremental.prefill(net, tgt_BMT[:, 0, :2], decoding)
    with Allocations() as allocated:
        decoding = incremental.spread(decoding, 2)
    assert allocated.elements == 3 * 2 * 2 * WIDTH * LENGTH
    for position in range(2, LENGTH):
        x_RD, decoding = incremental.step(net, tgt_BMT[:, :, position].flatten(), decoding)
        sources, read = src_BS.repeat_interleave(2, 0), tgt_BMT[:, :, : position + 1].flatten(0, 1)
        torch.testing.assert_close(net.head(x_RD), net(src=sources, tgt=read)[:, -1], rtol=0, atol=1e-5)
        if position == 3:
            rows = torch.tensor([2, 0])
            decoding, src_BS, tgt_BMT = incremental.select(decoding, rows), src_BS[rows], tgt_BMT[rows]
        before = caches_of(decoding)
        origin_BM = torch.tensor([[1, 0], [0, 0], [1, 1]])[: len(tgt_BMT)]
        incremental.reorder(decoding, origin_BM)
        assert caches_of(decoding) == before == [["one", "two"]] * 2
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)


@torch.no_grad()
def test_a_window_that_is_read_in_blocks_shares_caches_with_full_attention():
    net = two_layers({"block": "restricted_shared_attention", "r": 5}, {})
    expect_steps(net, {"tgt": torch.randint(1, VOCAB, (2, 80))}, (77,))


@torch.no_grad()
def test_graphs_of_onnx_keep_a_cache_for_each_layer():
    net = two_layers({}, {})
    layout = StateLayout(incremental.start(net, {}, 0, sentences=2))
    assert layout.changing == ["one.k", "one.v", "two.k", "two.v"]
