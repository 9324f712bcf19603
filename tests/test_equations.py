"""Every numbered equation of the documents that the project follows, checked on our blocks.

Two write tensors with their indices and columns for vectors, after R. R. Tucci, Bayesuvius, the chapter on transformers:
BK is the edition of 26 equations, BQ that of 23, where K and Q change places in the scores. Three are notes: N1 by
hand on the paper, N2 by hand on a lecture that writes words as x^<t>, N3 slides that write columns, β and softargmax. The blocks compute;
the test writes the equation, with their indices in their order. docs/notation.md says which symbol is which here.

Indices: n heads, d and e widths of a head, D width of all heads, a and z positions in a segment, b words in the vocabulary.
"""

import math

import pytest
import torch
from torch import einsum

import tfm_blocks as tfm
from tests.blocks.naive import NaiveAttention
from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.attention_parts import Softmax
from tfm_blocks.blocks.embedding import Embedding
from tfm_blocks.blocks.feedforward import FeedForward
from tfm_blocks.blocks.layers.dot_product import merge_heads, split_heads
from tfm_blocks.blocks.mixing import Sum
from tfm_blocks.blocks.norm import CentredL2Norm, L2Norm
from tfm_blocks.blocks.position import Sinusoidal
from tfm_blocks.blocks.restricted import RestrictedAttention
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

HEADS, d, WORDS, LENGTH = 3, 4, 11, 5
D = HEADS * d


def filled(block):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return block.eval().requires_grad_(False)


def columns(seed=0, width=D, length=LENGTH):
    """Return a segment as they write it, a column for each position: e[D, a]."""
    return torch.randn(width, length, generator=torch.Generator().manual_seed(seed))


def rows(x_Da):
    """Return the same segment as our batch: x_1ND."""
    return x_Da.T[None]


def whole(length=LENGTH):
    return torch.ones(1, length, dtype=torch.bool)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[D, d], ids=["D wide", "d wide"])
def attention(request):
    """Return attention on embeddings as wide as all heads, as in the paper and here, or as wide as one, as in BK and BQ."""
    return filled(Attention(request.param, None, heads=HEADS, d_head=d, bias=False))


def read_by(attention):
    """Return a segment e[D, a] of the width that the attention reads."""
    return columns(width=attention.qkv.in_features)


def maps(attention):
    """Return W_q, W_k and W_v as they write them: W[n, d, D]."""
    return (one.view(HEADS, d, -1) for one in attention.qkv.weight.chunk(3))


def made(attention, e_Da):
    """Return Q, K and V[n, d, a], written out."""
    return (einsum("ndD,Da->nda", w, e_Da) for w in maps(attention))


def test_heads_are_split_off_the_width_and_put_side_by_side():
    """BK (1), (2), (3), (15); BQ (1), (2), (3), (14): T^{ν,δ} -> T^Δ and back, where Δ = ν d + δ."""
    T_D = columns()
    (T_1nad,) = split_heads(rows(T_D), HEADS, 1)
    for n in range(HEADS):
        for one in range(d):
            assert torch.equal(T_1nad[0, n, :, one], T_D[n * d + one])
    assert torch.equal(merge_heads(T_1nad), rows(T_D))
    assert torch.equal(merge_heads(T_1nad)[0].T, torch.cat([T_1nad[0, n].T for n in range(HEADS)]))


def test_a_gate_is_a_product_entry_by_entry():
    """BK (4), BQ (4): T * S = (T^ν S^ν)."""
    gated = filled(REGISTRY.make(Part("gated_ffn", {"d_ff": 7, "bias": False, "activation": Part("relu")}), D))
    T_F, S_F = (w @ columns()[:, 0] for w in gated.inner.weight.chunk(2))
    product_F = torch.stack([max(T_F[v].item(), 0) * S_F[v] for v in range(7)])
    close(gated(rows(columns()))[0, 0], gated.out.weight @ product_F)


def test_a_linear_map_is_a_matrix_product_to_the_left_of_columns():
    """BK (5), (6), BQ (5), (6): (T^T) S is a number, T S sums over the index between."""
    linear, x_Da = filled(REGISTRY.make(Part("linear", {"d_out": 7, "bias": False}), D)), columns()
    y_oa = linear(rows(x_Da))[0].T
    for o in range(7):
        for a in range(LENGTH):
            close(y_oa[o, a], sum(linear.weight[o, k] * x_Da[k, a] for k in range(D)))
            close(y_oa[o, a], linear.weight[o] @ x_Da[:, a])


def one_hot(ids_a):
    """Return x[b, a] = δ(b, b(a)); each column has one 1."""
    x_ba = torch.zeros(WORDS, len(ids_a))
    for a, b in enumerate(ids_a):
        x_ba[b, a] = 1
    return x_ba


def test_an_embedding_is_a_matrix_times_columns_with_one_1():
    """BK (7), (8), BQ (7): e = E x. Ours has the word first, E^T, and multiplies by √D (Vaswani et al. 2017, 3.4)."""
    ids_a = [3, 1, 10, 3, 7]
    for scale, factor in ((1.0, 1.0), (None, math.sqrt(D))):
        embedding = filled(Embedding(vocab=WORDS, d_model=D, scale=scale))
        E_Db = embedding.weight.T
        close(embedding(torch.tensor([ids_a]))[0].T, factor * einsum("Db,ba->Da", E_Db, one_hot(ids_a)))


def test_ids_beyond_a_table_read_the_row_of_the_unknown_id():
    embedding = filled(Embedding(vocab=WORDS, d_model=D, first_id=1, unknown_id=3))
    known_BND = embedding(torch.tensor([[3, 1, WORDS - 1, 3]]))
    close(embedding(torch.tensor([[WORDS, 1, WORDS - 1, WORDS + 9]])), known_BND)
    with pytest.raises(IndexError):
        Embedding(vocab=WORDS, d_model=D)(torch.tensor([[WORDS]]))


def test_queries_keys_and_values_are_maps_of_the_embeddings(attention):
    """BK (9), (10), (11), BQ (8), (9), (10): Q^{ν,δ,α} = Σ W^{ν,δ,δ'} e^{δ',α}; N2: q = W^Q x."""
    e_Da = read_by(attention)
    for actual, expected in zip(split_heads(attention.qkv(rows(e_Da)), HEADS, 3), made(attention, e_Da), strict=True):
        close(actual[0].transpose(1, 2), expected)


def P_naz(attention, e_Da, *, keys_first):
    """Return softmax(B) as the probability of key a for query z, from K^T Q or from Q^T K."""
    Q_nda, K_nda, _ = made(attention, e_Da)
    if keys_first:
        B_naz = einsum("nda,ndz->naz", K_nda, Q_nda) / math.sqrt(d)
        return torch.exp(B_naz) / torch.exp(B_naz).sum(1, keepdim=True)
    B_nza = einsum("ndz,nda->nza", Q_nda, K_nda) / math.sqrt(d)
    return (torch.exp(B_nza) / torch.exp(B_nza).sum(2, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("keys_first", [True, False], ids=["BK", "BQ"])
def test_scores_become_probabilities_of_the_keys(attention, keys_first):
    """BK (12), (14), (16), BQ (11): K^T Q with the softmax along its first position, Q^T K along its second."""
    e_Da = read_by(attention)
    w_nza = attention.weights(rows(e_Da), keep_BT=whole())[0]
    w_naz = w_nza.transpose(1, 2)
    close(w_naz, P_naz(attention, e_Da, keys_first=keys_first))
    close(w_naz.sum(1), torch.ones(HEADS, LENGTH))
    # sums over the other index are not 1: "important" below BK (16)
    assert (w_naz.sum(2) - 1).abs().max() > 0.1


def head_outputs(attention, e_Da):
    """Return A[n, d, z], the outputs of the heads before the last map."""
    seen = []
    hook = attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    attention(rows(e_Da), keep_BT=whole(e_Da.shape[1]))
    hook.remove()
    return seen[0][0].T.reshape(HEADS, d, -1)


@pytest.mark.parametrize("keys_first", [True, False], ids=["BK", "BQ"])
def test_attention_mixes_values_by_the_probabilities_of_their_keys(attention, keys_first):
    """BK (13), (15), BQ (12), (13), (14): A^{ν,δ,α'} = Σ_α V^{ν,δ,α} P(α|ν,α'), then A^{ν,δ} -> A^Δ.

    P is that of the keys α, which stand first in BK (12) and second in BQ (11).
    """
    e_Da = read_by(attention)
    _, _, V_nda = made(attention, e_Da)
    A_ndz = einsum("nda,naz->ndz", V_nda, P_naz(attention, e_Da, keys_first=keys_first))
    close(head_outputs(attention, e_Da), A_ndz)
    close(attention(rows(e_Da), keep_BT=whole())[0].T, attention.out.weight @ A_ndz.reshape(D, LENGTH))


def test_bq_12_as_written_is_attention_with_queries_and_keys_exchanged(attention):
    """BQ (11), (12): Σ_α V^α softmax(B^{α,α'}) with B^{α,α'} = Q^α K^α' sums over the index of Q, not over that of K."""
    e_Da = read_by(attention)
    exchanged = filled(Attention(len(e_Da), None, heads=HEADS, d_head=d, bias=False))
    w_q, w_k, w_v = attention.qkv.weight.chunk(3)
    exchanged.qkv.weight.copy_(torch.cat([w_k, w_q, w_v]))
    Q_nda, K_nda, V_nda = made(attention, e_Da)
    B_naz = einsum("nda,ndz->naz", Q_nda, K_nda) / math.sqrt(d)
    close(head_outputs(exchanged, e_Da), einsum("nda,naz->ndz", V_nda, torch.softmax(B_naz, 1)))


def test_two_words_and_a_head_of_width_three():
    """BK (17): [V0, V1] -> [V0 P(0|0) + V1 P(1|0), V0 P(0|1) + V1 P(1|1)]."""
    attention, e_Da = filled(Attention(3, None, heads=1, bias=False)), columns(width=3, length=2)
    attention.out.weight.copy_(torch.eye(3))
    V_da = attention.qkv.weight[6:] @ e_Da
    P_za = attention.weights(rows(e_Da), keep_BT=whole(2))[0, 0]
    y_da = attention(rows(e_Da), keep_BT=whole(2))[0].T
    close(y_da[:, 0], V_da[:, 0] * P_za[0, 0] + V_da[:, 1] * P_za[0, 1])
    close(y_da[:, 1], V_da[:, 0] * P_za[1, 0] + V_da[:, 1] * P_za[1, 1])


def sines(width, length):
    """Return the table as they write it: E_pos[d, a]."""
    return Sinusoidal(width)(torch.zeros(1, length, width))[0].T


def test_a_sine_and_a_cosine_share_each_wavelength():
    """BK (18), BQ (15), N1, N2: sin(pos / 10^(4δ/d)) where δ is even, cos(pos / 10^(4(δ-1)/d)) where it is odd."""
    width, E_da = 8, sines(8, 40)
    for delta in range(width):
        for position in range(40):
            even = delta - delta % 2
            wavelength = 2 * math.pi * 10 ** (4 * even / width)
            expected = (math.cos if delta % 2 else math.sin)(2 * math.pi * position / wavelength)
            assert E_da[delta, position].item() == pytest.approx(expected, abs=2e-6)
            i = delta // 2  # of N1 and N2, which count the pairs
            angle = position / 10000 ** (2 * i / width)
            assert expected == pytest.approx((math.cos if delta % 2 else math.sin)(angle), abs=1e-12)


def test_wavelengths_grow_from_2_pi_towards_10_000_times_2_pi():
    """BK (18), BQ (15), N1: λ(0) = 2π, and λ(δ) -> 2π · 10^4 as δ -> d, measured by the angle of the first step."""
    width = 512
    E_da = sines(width, 2).double()
    wavelength_i = 2 * math.pi / torch.atan2(E_da[0::2, 1], E_da[1::2, 1])
    ratio = 10 ** (8 / width)
    assert wavelength_i[0].item() == pytest.approx(2 * math.pi, rel=1e-6)
    torch.testing.assert_close(
        wavelength_i[1:] / wavelength_i[:-1], torch.full((255,), ratio).double(), rtol=1e-5, atol=0
    )
    assert wavelength_i[-1].item() * ratio == pytest.approx(2 * math.pi * 1e4, rel=1e-5)


@pytest.mark.parametrize("h", [1, 7])
def test_the_encoding_further_on_is_a_rotation_of_the_encoding_here(h):
    """N1: PE(pos+h, 2i) = PE(pos, 2i) cos ω_i h + PE(pos, 2i+1) sin ω_i h, and its cosine alike, with ω_i = 10^(-4·2i/d)."""
    width, PE = 8, sines(8, 40).double().T
    for i in range(width // 2):
        omega = 1 / 10000 ** (2 * i / width)
        turn = torch.tensor([[math.cos(omega * h), math.sin(omega * h)], [-math.sin(omega * h), math.cos(omega * h)]])
        torch.testing.assert_close(
            PE[h:, 2 * i : 2 * i + 2], PE[:-h, 2 * i : 2 * i + 2] @ turn.double().T, rtol=0, atol=1e-5
        )


def test_total_embedding_is_the_sum():
    """BK, BQ below (18), (15): E = E_0 + E_pos."""
    close(Sinusoidal(D)(rows(columns()))[0].T, columns() + sines(D, LENGTH))


def test_relu_is_the_larger_of_0_and_each_entry():
    """BK (19), BQ (16): (T)_+ = max(0, T), of any shape."""
    T = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    y = REGISTRY.make(Part("relu"), 4)(T)
    assert y.flatten().tolist() == [max(0.0, one) for one in T.flatten().tolist()]


def test_a_feed_forward_network_by_rows_and_by_columns():
    """BK (20), (21), BQ (17), (18), N1: F(x) = ReLU(x W1 + b1) W2 + b2, or W2 ReLU(W1 x + b1) + b2; they write b1 twice."""
    ffn, x_Da = filled(FeedForward(D, d_ff=7)), columns()
    W1, b1, W2, b2 = ffn.inner.weight, ffn.inner.bias, ffn.out.weight, ffn.out.bias
    y_Da = ffn(rows(x_Da))[0].T
    for a in range(LENGTH):
        close(y_Da[:, a], W2 @ (W1 @ x_Da[:, a] + b1).clamp(min=0) + b2)
        x_1D = x_Da[:, a][None]
        close(y_Da[:, a][None], (x_1D @ W1.T + b1[None]).clamp(min=0) @ W2.T + b2[None])


def softmax(*numbers):
    return Softmax(len(numbers), beta=1)(torch.tensor([[numbers]]))[0, 0].tolist()


def test_softmax_makes_probabilities():
    """BK (22), (23), BQ (19), (20): P^α = exp(x^α) / Σ exp(x^α); their norm with the index 0 is that sum."""
    x = columns()[:, 0].tolist()
    total = sum(math.exp(one) for one in x)
    assert softmax(*x) == pytest.approx([math.exp(one) / total for one in x], rel=1e-5)
    assert sum(softmax(*x)) == pytest.approx(1)


def test_softmax_of_their_examples():
    """BK (24), (25), BQ (21), (22): (1, 0, 0) -> (e, 1, 1) / norm, and (10, 0, 0) -> nearly (1, 0, 0)."""
    assert softmax(1.0, 0.0, 0.0) == pytest.approx([one / (math.e + 2) for one in (math.e, 1, 1)])
    assert softmax(10.0, 0.0, 0.0) == pytest.approx([1, 0, 0], abs=1e-4)


@pytest.mark.parametrize("a", [-3.0, 0.0, 0.5, 100.0])
def test_softmax_of_three_equal_numbers_is_a_third_each(a):
    """BK (26), BQ (23): (a, a, a) -> (1, 1, 1) / 3."""
    assert softmax(a, a, a) == pytest.approx([1 / 3] * 3)


def test_add_and_normalise_divides_by_the_length_of_the_sum():
    """BK, add & normalize: (A + B) / ‖A + B‖₂, or the same of X - <X>."""
    A, B = columns(1), columns(2)
    X = A + B
    close(L2Norm()(Sum()([rows(A), rows(B)]))[0].T, torch.stack([x / x.square().sum().sqrt() for x in X.T], 1))
    centred = [x - x.sum() / D for x in X.T]
    close(CentredL2Norm()(rows(X))[0].T, torch.stack([x / x.square().sum().sqrt() for x in centred], 1))


@pytest.mark.parametrize("block", [Attention, NaiveAttention])
def test_attention_in_the_paper_s_rows(block):
    """N1, N2: softmax(Q K^T / √d_k) V in each head; concat(head_1, …, head_h) W_o."""
    attention, X_aD = filled(block(D, None, heads=HEADS)), columns().T
    Q, K, V = (X_aD @ w.T + b for w, b in zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True))
    heads = []
    for n in range(HEADS):
        part = slice(n * d, n * d + d)
        heads.append(torch.softmax(Q[:, part] @ K[:, part].T / math.sqrt(d), 1) @ V[:, part])
    expected = torch.cat(heads, 1) @ attention.out.weight.T + attention.out.bias
    close(attention(X_aD[None], keep_BT=whole())[0], expected)


def test_one_query_at_a_time():
    """N2: A(q, k, v) = Σ_i exp(q·k^<i>) v^<i> / Σ_j exp(q·k^<j>), without √d_k."""
    attention = filled(Attention(D, None, heads=HEADS, bias=False, scores=Part("softmax", {"beta": 1.0})))
    Q_nda, K_nda, V_nda = made(attention, columns())
    heads_ndz = head_outputs(attention, columns())
    for n in range(HEADS):
        for z in range(LENGTH):
            parts = [math.exp((Q_nda[n, :, z] @ K_nda[n, :, i]).item()) for i in range(LENGTH)]
            close(heads_ndz[n, :, z], sum(part * V_nda[n, :, i] for i, part in enumerate(parts)) / sum(parts))


def test_softargmax_of_keys_times_a_query():
    """N3: a = softargmax_β(K^T q), h = V a, H = V A, with q, k of width d', v of d'', β = 1/√d', and W_h back to d."""
    wide, value, tau, t = 5, 2, 6, 4
    block = filled(Attention(D, 7, heads=HEADS, d_head=wide, d_value=value, bias=False))
    x, xi = columns(length=t), columns(3, width=7, length=tau)
    keys, values = block.kv.weight.split([HEADS * wide, HEADS * value])
    attended = []
    for n in range(HEADS):
        Q, K = block.q.weight[n * wide :][:wide] @ x, keys[n * wide :][:wide] @ xi
        V = values[n * value :][:value] @ xi
        A = torch.stack([torch.softmax((K.T @ q) / math.sqrt(wide), 0) for q in Q.T], 1)
        assert A.shape == (tau, t)
        attended.append(V @ A)
    H = block(rows(x), rows(xi), keep_BT=whole(t), keep_BS=whole(tau))[0].T
    close(H, block.out.weight @ torch.cat(attended))


def test_a_hidden_state_is_made_of_the_input_and_the_state_before():
    """N3: h[t] = g(W_h [x[t]; h[t-1]] + b_h), h[0] = 0, W_h = [W_hx W_hh]."""
    rnn, x_Da = filled(REGISTRY.make(Part("rnn", {"mask": "causal"}), D)), columns()
    W_hx, W_hh = rnn.forwards.input.weight, rnn.forwards.hidden.weight
    b_h = rnn.forwards.input.bias + rnn.forwards.hidden.bias
    y_Da, h = rnn(rows(x_Da), keep_BT=whole())[0].T, torch.zeros(D)
    for t in range(LENGTH):
        h = torch.tanh(torch.cat([W_hx, W_hh], 1) @ torch.cat([x_Da[:, t], h]) + b_h)
        close(y_Da[:, t], h)


def test_the_output_is_multiplied_by_the_matrix_of_the_embeddings():
    """N1: W_e = W_e' = W and W_out = W^T."""
    network = tfm.build("tiny", d_model=8, d_ff=12, heads=2, layers=1, vocab=WORDS).eval()
    W = network.get_parameter("src_emb.block.weight")
    assert network["logits"].block.weight is W
    x_1D = torch.randn(1, 8)
    close(network.head(x_1D), x_1D @ W.T)
    ids = torch.tensor([[3, 5, 9]])
    embedded = []
    network["src_emb"].block.register_forward_hook(lambda block, args, out: embedded.append(out))
    network(src=ids, tgt=ids)
    assert len(embedded) == 2
    for e_BND in embedded:
        close(e_BND, W[ids] * math.sqrt(8))


@pytest.mark.parametrize("r", [1, 4, 5])
def test_restricted_attention_sees_r_positions_around_itself(r):
    """N1: restricted self-attention, whose scores are n · r in the place of n · n."""
    block = filled(RestrictedAttention(D, heads=HEADS, r=r))
    w_naz = block.weights(rows(columns(length=9)), keep_BT=whole(9))[0]
    for z in range(9):
        seen = [a for a in range(9) if -(r // 2) <= a - z <= (r - 1) // 2]
        assert w_naz[0, z].nonzero()[:, 0].tolist() == seen
