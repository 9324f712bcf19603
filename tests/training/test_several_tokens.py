"""objective=several_tokens: parallel heads and a chain of modules, against a slow version in torch."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import JOINED
from tests.network.small import network
from tfm_blocks.data.layout import batch_of
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.network.incremental import prefill, start, step
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.training.objective import SeveralTokensObjective
from tfm_blocks.training.settings import LossSettings

EOS = 2
LAYER = {"self": {"block": "attention", "mask": "causal"}, "ffn": {"block": "ffn"}}


def parallel(heads):
    """Return the graph of Gloeckle et al. 2024: head k is a layer on the trunk that all heads share."""
    ahead = {f"ahead{number}": {"in": "stem", "repeat": 1, "layer": LAYER} for number in range(1, heads + 1)}
    return {"stem": {"repeat": 1, "layer": LAYER}, "main": {"repeat": 1, "layer": LAYER}, **ahead}


def chain(depth):
    """Return the graph of DeepSeek-V3: module k reads the output of module k - 1 and the embedding of a later token."""
    graph, before = {"main": {"repeat": 1, "layer": LAYER}}, "main"
    for k in range(1, depth + 1):
        graph |= {
            f"later{k}": {"block": "look_ahead", "in": "emb", "by": k, "add_norm": "none"},
            f"token{k}": {"block": "rmsnorm"},
            f"state{k}": {"block": "rmsnorm", "in": before},
            f"both{k}": {"block": "concat", "in": [f"token{k}", f"state{k}"]},
            f"map{k}": {"block": "linear", "d_out": 8, "bias": False},
            f"ahead{k}": {"repeat": 1, "layer": LAYER},
        }
        before = f"ahead{k}"
    return graph


def model(branches, depth):
    """Return a decoder with these branches, and one without them that has the same weights."""
    emb, logits = {"emb": {"block": "embedding", "in": "tgt"}}, {"block": "unembed", "first_id": 1}
    joined = {"block": "predict_ahead", "in": "main", "ahead": [f"ahead{k}" for k in range(1, depth + 1)]}
    made = network({"tgt": "B T"}, {**emb, **branches, "out": joined, "logits": logits}, add_norm="pre").double()
    main = {name: node for name, node in branches.items() if name in ("stem", "main")}
    plain = network({"tgt": "B T"}, {**emb, **main, "logits": logits}, add_norm="pre").double()
    plain.load_state_dict({name: made.state_dict()[name] for name in plain.state_dict()})
    return made, plain


def read():
    """Return rows of packed documents, of a prompt with its target, and of a short text."""
    generator = torch.Generator().manual_seed(1)
    labels_BT = torch.randint(3, 11, (3, 9), generator=generator)
    labels_BT[0, 2] = labels_BT[0, 3] = labels_BT[0, 7] = EOS
    tgt_BT = torch.cat([torch.ones(3, 1, dtype=torch.int64), labels_BT[:, :-1]], 1)
    labels_BT[1, :4] = 0
    labels_BT[2, 5], labels_BT[2, 6:], tgt_BT[2, 6:] = EOS, 0, 0
    return batch_of({"tgt": tgt_BT}, labels_BT)


def value(made, address, ids_T):
    """Return the value of a node for one row without padding."""
    values, keeps = made.begin({"tgt": ids_T[None]})
    for call in made.calls:
        values[call.address] = call(values, keeps)
    return values[address][0]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("branches", [parallel, chain])
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_losses_and_gradients_equal_those_of_a_loop_over_positions(branches, depth, recomputes):
    made, _ = model(branches(depth), depth)
    made.recomputes = recomputes
    batch, losses = read(), LossSettings(ahead=0.5, z_loss=0.01)
    total, sums = SeveralTokensObjective(made, 0.1, None, losses).loss(batch)
    own = torch.autograd.grad(total, list(made.parameters()))
    main, z_loss, nll, later = 0.0, 0.0, 0.0, 0.0
    for labels_T, ids_T in zip(batch.labels_BT, batch.inputs["tgt"], strict=True):
        length = int((ids_T != 0).sum())
        labels, ids_T = labels_T.tolist(), ids_T[:length]
        for position in range(length):
            if not labels[position]:
                continue
            logits_V = made.head(value(made, "out", ids_T)[position])[1:]
            label = torch.tensor(labels[position] - 1)
            main = main + F.cross_entropy(logits_V, label, label_smoothing=0.1)
            nll, z_loss = nll + F.cross_entropy(logits_V, label), z_loss + logits_V.logsumexp(0).square()
            for k in range(1, depth + 1):
                if position + k >= length or EOS in labels[position : position + k]:
                    break
                logits_V = made.head(value(made, f"ahead{k}.last", ids_T)[position])[1:]
                label = torch.tensor(labels[position + k] - 1)
                later = later + F.cross_entropy(logits_V, label, label_smoothing=0.1) * 0.5 / depth
    expected = main + 0.01 * z_loss + later
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sums, torch.stack([main, nll, 0.01 * z_loss, later]).detach(), rtol=1e-6, atol=1e-9)
    theirs = torch.autograd.grad(expected, list(made.parameters()))
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-9)
    assert all(gradient.abs().max() > 0 for gradient in own)


@pytest.mark.parametrize("branches", [parallel, chain])
def test_decoding_and_scores_leave_the_later_tokens_out(branches):
    made, plain = model(branches(2), 2)
    ids_BT = read().inputs["tgt"][:2]
    torch.testing.assert_close(made(tgt=ids_BT), plain(tgt=ids_BT))
    objectives = SeveralTokensObjective(made.float(), 0.0), SeveralTokensObjective(made.float(), 0.0)
    assert objectives[0].scores(read())[0] > 0
    made.double()
    x_BTD, decoding = prefill(made, ids_BT[:, :4], start(made, {}, 9, sentences=2))
    assert not [address for address in decoding.states if address.startswith(("ahead", "later", "map"))]
    rows = [x_BTD, *(step(made, ids_BT[:, place], decoding)[0][:, None] for place in range(4, 9))]
    torch.testing.assert_close(made.head(torch.cat(rows, 1)), plain(tgt=ids_BT))


@pytest.mark.grid
def test_a_run_logs_the_weighted_loss_of_later_tokens_under_its_name(small, tmp_path):
    options = ["objective=several_tokens", "++model.graph.ahead={block: ffn, in: decoder, before: logits}", JOINED]
    run = train(check_run(small(*options, "losses.ahead={start: 1, end: 0.5, steps: 2}", "trainer.steps=2")), tmp_path)
    (row,) = (row for row in read_rows(run / "metrics.csv") if "train/aux_loss/ahead" in row)
    assert row["train/aux_loss/ahead"] > 0 and any("val/bleu" in row for row in read_rows(run / "metrics.csv"))


AHEAD = ["++model.graph.ahead={block: ffn, in: decoder, before: logits}", JOINED]


@pytest.mark.parametrize(
    ("overrides", "address", "rule"),
    [
        (["objective=several_tokens"], "model.graph", "but no node has the block predict_ahead"),
        (AHEAD, "model.graph.out", "which objective=next_token does not train"),
        (["objective=distil", "objective.teacher=x", *AHEAD], "model.graph.out", "objective=distil does not train"),
        (["objective=several_tokens", "model=encoder_only"], "model.inputs", "the model reads src"),
        (
            ["objective=several_tokens", "model=decoder_only", "++model.graph.a={block: predict_ahead, in: emb, ahead: [emb], before: pos}"],
            "model.graph.a",
            "is not the node before the output",
        ),
        (["losses.ahead=0.1"], "losses.ahead", "is a weight of objective=several_tokens, but objective=next_token has no"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_before_training(small, overrides, address, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        check_run(small(*overrides))
    problem = next(problem for problem in caught.value.problems if problem.address == address)
    assert problem.help
