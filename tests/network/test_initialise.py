"""Initial values depend only on (seed, address)."""

import math

import torch

import tfm_blocks as tfm
from tfm_blocks.language.check import deepnorm_constants


def test_the_same_seed_gives_the_same_weights_and_another_gives_others():
    one, two, other = (dict(tfm.build("tiny", layers=1, vocab=50, seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["src_emb.block.weight"], other["src_emb.block.weight"])


def test_variants_share_the_weights_that_they_have_in_common():
    shallow, deep, restricted = (
        dict(tfm.build(model, vocab=50, **knobs).named_parameters())
        for model, knobs in (
            ("tiny", {"layers": 1}),
            ("tiny", {"layers": 3}),
            ("restricted", {"d_model": 128, "d_ff": 256, "heads": 4, "layers": 2}),
        )
    )
    assert shallow.keys() < deep.keys()
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)
    assert all(torch.equal(restricted[name], deep[name]) for name in restricted)


def test_deepnorm_scales_20_of_65_tensors_by_beta_and_starts_the_others_as_base_does():
    base, deep = (tfm.build(model, layers=2, d_model=16, d_ff=32, heads=4, vocab=50) for model in ("base", "deepnorm"))
    scaled = set()
    for name, before in base.named_parameters():
        after = deep.get_parameter(name)
        if not torch.equal(before, after):
            scaled.add(name)
            _, beta = deepnorm_constants(2, 2, decoding=name.startswith("decoder"))
            same_rows = 2 * 16 if name.endswith("qkv.weight") else 16 if name.endswith("kv.weight") else 0  # of q and k
            assert torch.equal(after[:same_rows], before[:same_rows])
            torch.testing.assert_close(after[same_rows:], before[same_rows:] * beta, rtol=1e-6, atol=0)
    attention, ffn = {"qkv.weight", "out.weight"}, {"inner.weight", "out.weight"}
    expected = {"attn": attention, "self": attention, "cross": {"kv.weight", "out.weight"}, "ffn": ffn}
    layers = [("encoder", "attn"), ("encoder", "ffn"), ("decoder", "self"), ("decoder", "cross"), ("decoder", "ffn")]
    assert scaled == {
        f"{side}.{i}.{node}.block.{map_}" for side, node in layers for i in (0, 1) for map_ in expected[node]
    }
    assert (len(scaled), len(list(base.parameters()))) == (20, 65)


def test_building_does_not_change_the_callers_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    tfm.build("tiny", layers=1, vocab=50)
    assert torch.equal(torch.rand(2), expected)


def test_each_of_q_k_v_starts_by_its_own_fan():
    weight = tfm.build("tiny", layers=1, vocab=50).get_parameter("encoder.0.attn.block.qkv.weight")
    bound = math.sqrt(6 / (128 + 128))
    for part in weight.chunk(3):
        assert 0.98 * bound < part.abs().max() <= bound


def test_scaled_embeddings_have_unit_variance():
    model = tfm.build("tiny", layers=1, vocab=2000)
    assert abs(model["src_emb"].block(torch.arange(2000)[None]).std().item() - 1) < 0.01


def test_with_deepnorm_experts_start_smaller_by_the_factor_of_the_other_branches_and_their_router_does_not():
    layer = "model.graph.encoder.layer.ffn"
    shape = {f"{layer}.block": "moe", f"{layer}.experts": 3, "layers": 2, "d_model": 12, "vocab": 20}
    deep, post = (tfm.build("tiny", **shape, **{"model.add_norm": one}).state_dict() for one in ("deepnorm", "post"))
    factor = deep["encoder.1.attn.block.out.weight"][0, 0] / post["encoder.1.attn.block.out.weight"][0, 0]
    assert factor < 0.9
    for name, expected in (("experts.inner", factor), ("experts.out", factor), ("router.map", 1)):
        address = f"encoder.1.ffn.block.{name}.weight"
        torch.testing.assert_close(deep[address], post[address] * expected)
