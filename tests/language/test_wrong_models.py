"""A table of wrong models: each error has the address, the exact rule, a place in the file and a fix, and fits a screen."""

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model

SCREEN = 24  # lines
LONGEST = 2000  # characters

WRONG = {  # by rule, whose `{}` are the values of each model: the change of the model tiny, the address below `model`, the values
    "unknown key {}": [
        ("{graph: {encoder: {layer: {attn: {haeds: 4}}}}}", "graph.encoder.layer.attn.haeds", "'haeds'"),
        ("{grpah: {x: {block: ffn}}}", "grpah", "'grpah'"),
        ("{graph: {encoder: {repaet: 2}}}", "graph.encoder.repaet", "'repaet'"),
        ("{graph: {encoder: {join: {block: sum, weight: 2}}}}", "graph.encoder.join.weight", "'weight'"),
        ("{graph: {src_pos: {tie: src_emb}}}", "graph.src_pos.tie", "'tie'"),
    ],
    "no {} is called {}": [
        ("{graph: {encoder: {layer: {ffn: {block: fnn}}}}}", "graph.encoder.layer.ffn.block", "block", "'fnn'"),
        ("{args: {norm: rmsnrom}}", "args.norm", "norm", "'rmsnrom'"),
        ("{args: {activation: rleu}}", "args.activation", "activation", "'rleu'"),
        ("{graph: {encoder: {join: smu}}}", "graph.encoder.join", "join", "'smu'"),
        ("{graph: {encoder: {layer: {ffn: {block: [ffn]}}}}}", "graph.encoder.layer.ffn.block", "block", "['ffn']"),
        ("{args: {norm: [layernorm]}}", "args.norm", "norm", "['layernorm']"),
        ("{args: {norm: ffn}}", "args.norm", "norm", "'ffn'"),
    ],
    "no block takes 'haeds' from here": [("{graph: {encoder: {args: {haeds: 4}}}}", "graph.encoder.args.haeds")],
    "add_norm post has the unknown operation 'dropuot'; did you mean dropout? one of: add, dropout, droppath, gain, norm, scale": [
        ("{add_norm: {post: [dropuot, add]}}", "add_norm")
    ],
    "'pst' is not an add & norm preset; did you mean post? one of: branch, deepnorm, layerscale, none, post, pre, rezero, sandwich": [
        ("{add_norm: pst}", "add_norm")
    ],
    "rmsnorm has no argument 'esp'": [("{args: {norm: {block: rmsnorm, esp: 1e-3}}}", "args.norm.esp")],
    "a node must have exactly one of block, same, layer, parallel, but this has {}": [
        ("{graph: {encoder: {same: src_emb}}}", "graph.encoder", "same and layer"),
        ("{graph: {encoder: {layer: {more: {heads: 4}}}}}", "graph.encoder.layer.more", "none of them"),
    ],
    "must be a mapping, but is {}": [
        ("{graph: {encoder: {layer: {attn: attention}}}}", "graph.encoder.layer.attn", "'attention'"),
        ("{graph: {more: {layer: [ffn], before: encoder}}}", "graph.more.layer", "['ffn']"),
        ("{graph: {encoder: {at: {0: ffn}}}}", "graph.encoder.at.0", "'ffn'"),
    ],
    "has no nodes": [("{graph: {encoder: {layer: {attn: null, ffn: null}}}}", "graph.encoder.layer")],
    "is missing or empty": [
        (
            "{graph: {src_emb: null, src_pos: null, encoder: null, tgt_emb: null, tgt_pos: null, decoder: null, logits: null}}",
            "graph",
        )
    ],
    "parallel needs join, which combines its branches": [
        (
            "{graph: {both: {parallel: {a: {block: ffn}, b: {block: ffn}}, before: tgt_emb}, encoder: null}}",
            "graph.both",
        )
    ],
    "join combines parallel copies, and copies that share their weights are identical": [
        ("{graph: {encoder: {repeat: {times: 2, share: true}, join: sum}}}", "graph.encoder.join")
    ],
    "must be true or false, but is 1": [
        ("{graph: {encoder: {repeat: {times: 2, share: 1}}}}", "graph.encoder.repeat.share")
    ],
    "needs times": [
        ("{graph: {more: {repeat: {share: true}, layer: {f: {block: ffn}}, before: tgt_emb}}}", "graph.more.repeat")
    ],
    "repeat must be between 1 and 1000, but is {}": [
        ("{graph: {encoder: {repeat: 0}}}", "graph.encoder.repeat", "0"),
        ("{graph: {encoder: {repeat: 1001}}}", "graph.encoder.repeat", "1001"),
    ],
    "{} needs the unknown arg {}; one of: {}": [
        (
            "{graph: {encoder: {repeat: six}}}",
            "graph.encoder.repeat",
            "repeat",
            "'six'",
            "d_ff, d_model, dropout, heads, vocab",
        ),
        (
            "{args: {heads: 2*mask, mask: causal}}",
            "args.heads",
            "heads",
            "'causal'",
            "d_ff, d_model, dropout, heads, mask, vocab",
        ),
        (
            "{args: {attention_dropout: much}}",
            "args.attention_dropout",
            "attention_dropout",
            "'much'",
            "attention_dropout, d_ff, d_model, dropout, heads, vocab",
        ),
        (
            "{add_norm: {post: [{scale: half}, add]}}",
            "add_norm.scale",
            "scale",
            "'half'",
            "d_ff, d_model, dropout, heads, vocab",
        ),
    ],
    "changes single layers, but with share: true all layers are identical": [
        ("{graph: {encoder: {repeat: {times: 4, share: true}, at: {0: {ffn: null}}}}}", "graph.encoder.at")
    ],
    "there is no layer 9: the layers are 0 to 3": [
        ("{graph: {encoder: {at: {9: {ffn: null}}}}}", "graph.encoder.at.9")
    ],
    "'first' is not the index of a layer, and no arg": [
        ("{graph: {encoder: {at: {first: {ffn: null}}}}}", "graph.encoder.at.first")
    ],
    "wide has 'x', which is not the index of a layer": [
        ("{graph: {encoder: {args: {wide: 1 x}, at: {wide: {ffn: null}}}}}", "graph.encoder.args.wide")
    ],
    "lists layer 0 of 4 twice: 0 and -4": [
        ("{graph: {encoder: {at: {0: {ffn: null}, -4: {attn: null}}}}}", "graph.encoder.at")
    ],
    "lists layer 2 of 4 twice: ::2 and 2": [
        ("{graph: {encoder: {at: {'::2': {ffn: null}, 2: {attn: null}}}}}", "graph.encoder.at")
    ],
    "::0 has the step 0": [("{graph: {encoder: {at: {'::0': {ffn: null}}}}}", "graph.encoder.at.::0")],
    "'0:1:2:3' is not the index of a layer": [
        ("{graph: {encoder: {at: {'0:1:2:3': {ffn: null}}}}}", "graph.encoder.at.0:1:2:3")
    ],
    "{} needs the unknown arg {}; did you mean heads? one of: d_ff, d_model, dropout, heads, vocab": [
        ("{graph: {encoder: {at: {':haeds': {ffn: null}}}}}", "graph.encoder.at.:haeds", ":haeds", "'haeds'")
    ],
    "{} has several numbers, which only layers that do not share their weights take one by one": [
        ("{args: {vocab: 30 40}}", "args.vocab", "vocab"),
        (
            "{graph: {encoder: {repeat: {times: 2, share: true}, args: {heads: 2 4}}}}",
            "graph.encoder.args.heads",
            "heads",
        ),
    ],
    "{} has 2 numbers, but there are 3 layers": [
        ("{graph: {encoder: {repeat: 3, args: {heads: 2 4}}}}", "graph.encoder.args.heads", "heads"),
    ],
    "{} needs the unknown arg {}; i, n and I belong to layers that are repeated and do not share their weights": [
        (
            "{graph: {encoder: {repeat: {times: 2, share: true}, layer: {ffn: {d_ff: 8*(i+1)}}}}}",
            "graph.encoder.layer.ffn.d_ff",
            "d_ff",
            "'i'",
        ),
        ("{args: {vocab: 8*i}}", "args.vocab", "vocab", "'i'"),
    ],
    "{} needs the unknown arg 'I'; I belongs to layers of stacks, "
    "if neither they nor layers around them share their weights": [
        (
            "{graph: {encoder: {repeat: {times: 2, share: true}, layer: "
            "{inner: {repeat: 2, layer: {ffn: {block: ffn, d_ff: 8*(I+1)}}}}}}}",
            "graph.encoder.layer.inner.layer.ffn.d_ff",
            "d_ff",
        ),
        (
            "{graph: {copies: {repeat: 3, join: mean, before: logits, layer: {ffn: {block: ffn, d_ff: 8*(I+1)}}}}}",
            "graph.copies.layer.ffn.d_ff",
            "d_ff",
        ),
    ],
    "{} is the {} in arithmetic": [
        ("{args: {i: 4}}", "args.i", "i", "index of the layer"),
        ("{args: {I: 4}}", "args.I", "I", "index of the layer in the outermost stack"),
        ("{graph: {encoder: {args: {n: 4}}}}", "graph.encoder.args.n", "n", "number of layers"),
    ],
    "{} begins with in_, as the blocks do that are written inside of a port": [
        ("{graph: {in_proj: {block: ffn, before: encoder}}}", "graph.in_proj", "'in_proj'"),
    ],
    "{} is an attribute name of modules": [
        ("{graph: {train: {block: ffn, before: encoder}}}", "graph.train", "'train'"),
        ("{graph: {__class__: {block: ffn, before: encoder}}}", "graph.__class__", "'__class__'"),
        ("{graph: {_modules: {block: ffn, before: encoder}}}", "graph._modules", "'_modules'"),
    ],
    "{} is a reserved word": [
        ("{graph: {entry: {block: ffn, before: encoder}}}", "graph.entry", "'entry'"),
        ("{inputs: {entry: B P}}", "inputs.entry", "'entry'"),
        ("{inputs: {keep: B P}}", "inputs.keep", "'keep'"),
    ],
    "src is already an input": [("{graph: {src: {block: ffn, before: encoder}}}", "graph.src")],
    "a name consists of letters, digits and _, but is 'my ffn'": [
        ("{graph: {my ffn: {block: ffn, before: encoder}}}", "graph.my ffn")
    ],
    "the axes must be upper-case letters and widths, batch first, but are {}": [
        ("{inputs: {src: b s}}", "inputs.src", "'b s'"),
        ("{inputs: {src: B B}}", "inputs.src", "'B B'"),
        ("{inputs: {src: B}}", "inputs.src", "'B'"),
    ],
    "the first axis of all inputs is the batch, but they have A, B": [("{inputs: {src: A S}}", "inputs")],
    "no node reads this input": [("{inputs: {doc: B P}}", "inputs.doc")],
    "uses the axis of tgt, whose tokens are predicted": [("{inputs: {src: B T}}", "inputs.src")],
    "tgt is predicted token by token, so it must hold token ids": [
        ("{inputs: {tgt: B T 8}, graph: {tgt_emb: {same: null, block: linear, d_out: 128}}}", "inputs.tgt")
    ],
    "{} is neither an input nor an earlier node that can be read here": [
        ("{graph: {decoder: {layer: {cross: {kv: encodr}}}}}", "graph.decoder.layer.cross.kv", "'encodr'"),
        ("{graph: {decoder: {layer: {cross: {kv: attn}}}}}", "graph.decoder.layer.cross.kv", "'attn'"),
        ("{graph: {tgt_pos: {block: null, same: ffn}}}", "graph.tgt_pos.same", "'ffn'"),
    ],
    "{} comes later in the graph, but a node reads only inputs and earlier nodes": [
        ("{graph: {encoder: {in: decoder}}}", "graph.encoder.in", "'decoder'"),
        ("{graph: {encoder: {layer: {attn: {kv: decoder}}}}}", "graph.encoder.layer.attn.kv", "'decoder'"),
        ("{graph: {decoder: {layer: {self: {in: ffn}}}}}", "graph.decoder.layer.self.in", "'ffn'"),
        ("{graph: {src_emb: {block: null, same: tgt_emb}}}", "graph.src_emb.same", "'tgt_emb'"),
    ],
    "{} is this node itself, but a node reads only inputs and earlier nodes": [
        ("{graph: {src_pos: {in: src_pos}}}", "graph.src_pos.in", "'src_pos'"),
        ("{graph: {logits: {tie: logits}}}", "graph.logits.tie", "'logits'"),
    ],
    "latent_attention needs the argument {} (int)": [
        (
            "{graph: {encoder: {layer: {attn: {block: latent_attention, d_latent: 8}}, at: {0: {ffn: {d_ff: 8}}}}}}",
            "graph.encoder.layer.attn",
            "d_head",
        )
    ],
    "'decoder' contains this node, so its output does not exist yet": [
        ("{graph: {decoder: {layer: {cross: {kv: decoder}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "decoder.(i-1) is layer -1, but a layer of decoder can read only earlier layers": [
        ("{graph: {decoder: {layer: {cross: {kv: decoder.(i-1)}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "there are no earlier layers to read": [
        ("{graph: {decoder: {layer: {ffn: {in: {block: sum, in: decoder.*}}}}}}", "graph.decoder.layer.ffn.in.in")
    ],
    "{} is not a node of layer 0 of encoder that can be read here": [
        ("{graph: {decoder: {layer: {cross: {kv: encoder.0.self}}}}}", "graph.decoder.layer.cross.kv", "'self'")
    ],
    "{} is not a node of layer 0 of decoder that can be read here": [
        ("{graph: {decoder: {layer: {cross: {kv: decoder.0.ffn}}}}}", "graph.decoder.layer.cross.kv", "'ffn'")
    ],
    "must name an input, an earlier node, or a layer of a stack (encoder.0), but is {}": [
        ("{graph: {decoder: {layer: {cross: {kv: 3}}}}}", "graph.decoder.layer.cross.kv", "3"),
        ("{graph: {decoder: {layer: {cross: {kv: encoder.00}}}}}", "graph.decoder.layer.cross.kv", "'encoder.00'"),
    ],
    "encoder.9 is layer 9, but encoder has layers 0 to 3": [
        ("{graph: {decoder: {layer: {cross: {kv: encoder.9}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "src_emb has no layers: src_emb.0 needs a stack, which is a layer with repeat": [
        ("{graph: {decoder: {layer: {cross: {kv: src_emb.0}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "encoder.(i/2) is layer 0.0, but encoder has layers 0 to 3": [
        ("{graph: {decoder: {layer: {cross: {kv: encoder.(i/2)}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "kv reads one tensor, but has 4: encoder.0.ffn, encoder.1.ffn, encoder.2.ffn, …": [
        ("{graph: {decoder: {layer: {cross: {kv: encoder.*}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "reads one tensor, but is ['encoder', 'src_emb']": [
        ("{graph: {decoder: {layer: {cross: {kv: [encoder, src_emb]}}}}}", "graph.decoder.layer.cross.kv")
    ],
    "an inline node must be a block: {{block: NAME, in: …}}": [
        ("{graph: {decoder: {layer: {cross: {kv: {layer: {f: {block: ffn}}}}}}}}", "graph.decoder.layer.cross.kv"),
        (
            "{graph: {decoder: {layer: {cross: {kv: {block: ffn, in: encoder, before: ffn}}}}}}",
            "graph.decoder.layer.cross.kv",
        ),
    ],
    "has both before and after, which exclude each other": [
        ("{graph: {encoder: {layer: {more: {block: ffn, before: attn, after: ffn}}}}}", "graph.encoder.layer.more")
    ],
    "there is no node {} in this graph": [
        ("{graph: {encoder: {layer: {more: {block: ffn, before: atn}}}}}", "graph.encoder.layer.more.before", "'atn'"),
        (
            "{graph: {encoder: {layer: {more: {block: ffn, before: [attn]}}}}}",
            "graph.encoder.layer.more.before",
            "['attn']",
        ),
        ("{graph: {encoder: {layer: {more: {block: ffn, after: more}}}}}", "graph.encoder.layer.more.after", "'more'"),
    ],
    "'encoder' is not a block: same reuses the module of an earlier block": [
        ("{graph: {tgt_pos: {block: null, same: encoder}}}", "graph.tgt_pos.same")
    ],
    "unknown key {}: same takes inputs only": [
        ("{graph: {tgt_emb: {d_model: 4}}}", "graph.tgt_emb.d_model", "'d_model'"),
        ("{graph: {tgt_emb: {args: {heads: 2}}}}", "graph.tgt_emb.args", "'args'"),
        ("{graph: {tgt_emb: {add_norm: {pre: [norm]}}}}", "graph.tgt_emb.add_norm", "'add_norm'"),
    ],
    "needs at least one input": [("{graph: {both: {block: sum, in: [], before: tgt_emb}}}", "graph.both.in")],
    "the module of src_pos does not fit: D is 64 here, but 128 at src_pos": [
        (
            "{graph: {wide: {block: embedding, d_model: 64, in: src, before: tgt_emb}, again: {same: src_pos, in: wide, before: tgt_emb}, back: {block: linear, d_out: 128, before: tgt_emb}, decoder: {layer: {more: {block: attention, kv: back}}}}}",
            "graph.again",
        )
    ],
    "'src_pos' has no parameter that can be tied": [("{graph: {logits: {tie: src_pos}}}", "graph.logits.tie")],
    "cannot be tied to src_emb: its matrix is [300, 128], the matrix of src_emb is [10000, 128]": [
        ("{graph: {logits: {vocab: 300}}}", "graph.logits")
    ],
    "nothing reads the output of aside": [
        ("{graph: {aside: {block: ffn, in: encoder, before: tgt_emb}}}", "graph.aside")
    ],
    "the first node has no earlier node to read": [("{graph: {src_emb: {in: null}}}", "graph.src_emb")],
    "{} needs the argument {} (int)": [
        ("{args: {d_ff: null}}", "graph.encoder.layer.ffn", "ffn", "d_ff"),
        ("{args: {vocab: null}}", "graph.src_emb", "embedding", "vocab"),
    ],
    "gate needs the input ys": [("{graph: {encoder: {layer: {attn: {block: gate}}}}}", "graph.encoder.layer.attn")],
    "{} must be an int, but is {}": [
        ("{args: {heads: 2.5}}", "args.heads", "heads", "2.5: // divides and rounds down"),
        ("{args: {heads: d_model/32}}", "args.heads", "heads", "4.0: write 4, or // for a division"),
        ("{args: {heads: [4]}}", "args.heads", "heads", "[4]"),
    ],
    "ids are below vocab (vocab > reset_id), but vocab = 9, reset_id = 9": [
        (
            "{graph: {tgt_emb: null, ngrams: {block: ngram_embedding, in: tgt, vocab: 9, rows: 50, reset_id: 9, before: tgt_pos}}}",
            "graph.ngrams",
        )
    ],
    "the width must split evenly into heads (D % heads == 0), but D = 128 (the width of src_pos), heads = 7": [
        ("{args: {heads: 7}}", "graph.encoder.layer.attn")
    ],
    "there is at least one head (heads >= 1), but heads = 0": [("{args: {heads: 0}}", "graph.encoder.layer.attn")],
    "heads can hold numbers, names, + - * / // % **, sqrt, log and parentheses": [
        ("{args: {heads: abs(4)}}", "args.heads")
    ],
    "dropout has a root of a negative number": [("{args: {dropout: sqrt(-4)}}", "args.dropout")],
    "dropout has a logarithm of a number that is not above 0": [("{args: {dropout: log(0)}}", "args.dropout")],
    "heads 'four heads' is neither a number nor arithmetic": [("{args: {heads: 'four heads'}}", "args.heads")],
    "heads needs the unknown arg 'd_modle'; did you mean d_model? one of: d_ff, d_model, dropout, heads, vocab": [
        ("{args: {heads: d_modle//32}}", "args.heads")
    ],
    "heads divides by zero": [("{args: {heads: d_model//0}}", "args.heads")],
    "{} refers to itself: {}": [
        ("{args: {d_ff: heads, heads: d_ff}}", "args.d_ff", "d_ff", "d_ff → heads → d_ff"),
        ("{args: {heads: heads}}", "args.heads", "heads", "heads → heads"),
        ("{args: {heads: a, a: d_ff*2, d_ff: heads}}", "args.d_ff", "d_ff", "d_ff → heads → a → d_ff"),
        (
            "{graph: {encoder: {args: {heads: a, a: heads*2}}}}",
            "graph.encoder.args.heads",
            "heads",
            "heads → a → heads",
        ),
    ],
    "d_ff integers go up to 2^40, but this is 1099512676352": [("{args: {d_ff: 1048576*1048577}}", "args.d_ff")],
    "heads arithmetic has at most 80 characters, but this has 99": [
        (
            "{args: {heads: 1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1}}",
            "args.heads",
        )
    ],
    "{} must be from 0 to below 1, but is 1.0": [
        ("{args: {dropout: 1}}", "args.dropout", "dropout"),
        ("{add_norm: {post: [{droppath: 1}, add]}}", "add_norm.droppath", "droppath"),
    ],
    "mask must be one of causal, or null, but is 'casual'": [
        ("{graph: {decoder: {layer: {self: {mask: casual}}}}}", "graph.decoder.layer.self.mask")
    ],
    "mask: causal orders the positions of one sequence, but kv is another: leave one of them out": [
        ("{graph: {decoder: {layer: {cross: {mask: causal}}}}}", "graph.decoder.layer.cross")
    ],
    "an output position sees later target tokens, so the model would copy instead of predict": [
        ("{graph: {peek: {block: look_ahead, before: decoder}}}", "graph.peek"),
        ("{graph: {decoder: {layer: {self: {mask: null}}}}}", "graph.decoder.layer.self"),
    ],
    "a variance may be 0 (eps > 0), but eps = -1.0": [
        ("{args: {norm: {block: layernorm, eps: -1}}}", "graph.encoder.layer.attn")
    ],
    "add_norm post lists an operation twice: norm, add, norm": [("{add_norm: {post: [norm, add, norm]}}", "add_norm")],
    "add_norm pre cannot add: the residual is added to a branch's output, in post": [
        ("{add_norm: {pre: [add]}}", "add_norm")
    ],
    "add_norm post has the operation scale without its number: write {{scale: 0.5}}": [
        ("{add_norm: {post: [scale, add]}}", "add_norm")
    ],
    "add_norm post has {{'scale': 1, 'gain': 2}}: an operation with a number is one of scale, gain, droppath, add": [
        ("{add_norm: {post: [{scale: 1, gain: 2}]}}", "add_norm")
    ],
    "add_norm post has {{'scale': 0.5, 'per': 'channel'}}: a gain is per channel or per branch, and the factor of add per channel": [
        ("{add_norm: {post: [{scale: 0.5, per: channel}, add]}}", "add_norm")
    ],
    "add_norm post must be a list of operations (dropout, add, norm, scale, gain, droppath), but is 'norm'": [
        ("{add_norm: {post: norm}}", "add_norm")
    ],
    "add_norm has no key 'pots'; did you mean post? one of: last, post, pre": [
        ("{add_norm: {pots: [norm]}}", "add_norm")
    ],
    "add_norm must be a preset (post, pre, sandwich, branch, deepnorm, rezero, layerscale, none) or a mapping of pre, post, last, but is ['norm']": [
        ("{add_norm: [norm]}", "add_norm")
    ],
    "its output B S {} cannot be added to its input {}: a residual must keep the shape": [
        (
            "{graph: {encoder: {layer: {out: {block: unembed, vocab: 64, add_norm: post}}}}}",
            "graph.encoder.layer.out",
            "64",
            "B S 128",
        ),
        ("{graph: {src_emb: {add_norm: post}}}", "graph.src_emb", "128", "B S"),
    ],
    "a repeated layer must keep the shape, but this turns B S 128 into B S 64": [
        ("{graph: {encoder: {layer: {out: {block: linear, d_out: 64}}}}}", "graph.encoder")
    ],
    "{} reads vectors, but {} is {} of token ids": [
        (
            "{graph: {src_pos: {in: src}, src_emb: null, tgt_emb: {same: null, block: embedding}, logits: {tie: null}}}",
            "graph.src_pos",
            "x of sinusoidal",
            "src",
            "B S",
        ),
        (
            "{graph: {src_emb: {in: drop}, drop: {block: dropout, in: src, before: src_emb}}}",
            "graph.drop",
            "x of dropout",
            "src",
            "B S",
        ),
        (
            "{graph: {encoder: {layer: {ffn: {block: gate, ys: [attn, src_emb, tgt]}}}}}",
            "graph.encoder.layer.ffn",
            "ys of gate",
            "tgt",
            "B T",
        ),
    ],
    "x of embedding reads token ids, but src_emb is B S 128": [
        ("{graph: {src_pos: {block: embedding}}}", "graph.src_pos")
    ],
    "D is 128 in both.a, but 64 in both.b (B S 64)": [
        (
            "{graph: {both: {join: sum, parallel: {a: {block: ffn}, b: {block: linear, d_out: 64}}, before: encoder}}}",
            "graph.both",
        )
    ],
    "N is S in encoder.3.ffn, but T in tgt_emb (B T 128)": [
        ("{graph: {both: {block: sum, in: [encoder, tgt_emb], before: tgt_pos}}}", "graph.both")
    ],
    "has add & norm operations before sum, whose first port takes several tensors": [
        (
            "{graph: {both: {block: sum, in: [encoder, encoder], add_norm: {pre: [{scale: 0.5}]}, before: tgt_emb}}}",
            "graph.both.add_norm",
        )
    ],
    "{} around timestep would have separate weights in each layer that shares its weights": [
        (
            "{graph: {encoder: {repeat: {times: 2, share: true}, layer: {"
            f"t: {{block: timestep, step: i, add_norm: {{post: [{step}]}}, before: attn}}}}}}}}}}",
            "graph.encoder.layer.t.add_norm",
            name,
        )
        for step, name in (("norm", "norm"), ("{gain: 0.0}", "gain"), ("{add: 1.0, per: channel}", "add"))
    ],
    "changes the positions of tgt, which is decoded token by token": [
        ("{graph: {both: {block: concat_sequence, in: [encoder, tgt_emb], before: tgt_pos}}}", "graph.both")
    ],
    "the last node must treat each position of tgt separately, without add & norm": [
        ("{graph: {logits: null}}", "graph.decoder.layer.ffn"),
        ("{graph: {logits: {block: attention, mask: causal, vocab: null, tie: null}}}", "graph.logits"),
    ],
    "its constructor fails: Storage size calculation overflowed with sizes=[3298534883328, 1099511627776]": [
        ("{args: {d_model: 1099511627776}}", "graph.encoder.layer.attn")
    ],
}
CASES = [
    (row, f"model.{address}", rule.format(*values)) for rule, rows in WRONG.items() for row, address, *values in rows
]


def refused(fragment, folder):
    """Return the error of a child of the model tiny whose file contains `fragment`."""
    file = folder / "mine.yaml"
    file.write_text(f"# @package _global_\ndefaults: [tiny, _self_]\nmodel: {fragment}\n")
    with pytest.raises(ConfigError) as caught:
        composed = compose_model(str(file))
        check_model(composed.model, composed.sources)
    return caught.value


@pytest.mark.parametrize(("fragment", "address", "rule"), CASES)
def test_a_wrong_model_is_an_error_with_address_rule_and_fix(fragment, address, rule, tmp_path):
    error = refused(fragment, tmp_path)
    first = error.problems[0]
    assert (first.address, first.rule) == (address, rule)
    assert all(problem.help and problem.place for problem in error.problems)
    assert len(str(error)) <= LONGEST and len(str(error).splitlines()) <= SCREEN


def test_a_cycle_of_args_is_one_error_whichever_arg_leads_to_it(tmp_path):
    (problem,) = refused("{args: {heads: a, a: d_ff, d_ff: heads, dropout: a*0.1}}", tmp_path).problems
    assert problem.rule.endswith("d_ff → heads → a → d_ff") and problem.help == "write a number for d_ff or heads or a"


HUGE = "7" * 5000
LONG = {
    "a key": f"{{graph: {{encoder: {{layer: {{{'x' * 900}: {{block: ffn, nothing: 1}}}}}}}}}}",
    "a value": f"{{graph: {{encoder: {{layer: {{attn: {{block: {'y' * 5000}}}}}}}}}}}",
    "arithmetic": f"{{args: {{heads: {'1+' * 3000}1}}}}",
    "an integer": f"{{args: {{heads: {HUGE}}}}}",
    "axes": f"{{inputs: {{src: {'B ' * 3000}}}}}",
    "a list": f"{{add_norm: {{post: [{', '.join(['norm'] * 3000)}]}}}}",
    "many mistakes": f"{{graph: {{encoder: {{layer: {{{', '.join(f'n{one}: {{block: fnn}}' for one in range(900))}}}}}}}}}",
}


@pytest.mark.parametrize("fragment", LONG.values(), ids=LONG)
def test_whatever_is_long_the_message_is_not(fragment, tmp_path):
    error = refused(fragment, tmp_path)
    assert len(str(error)) <= LONGEST and all(problem.help for problem in error.problems)
    assert "…" in str(error) or "more problems" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        {"args": {"heads": 10**5000}},
        {"inputs": {"src": 10**5000}},
        {"add_norm": {"pre": ["norm"], 1: 2, None: 3}},
        {"graph": {1: {"block": "ffn"}, ("a", "b"): {"block": "ffn"}}},
        {"graph": {"encoder": {"repeat": 10**5000, "layer": {"f": {"block": "ffn"}}}}},
        {"graph": [1, 2]},
        {"inputs": ["src"]},
        {"args": "heads"},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_python_values_that_no_file_has_are_refused_too(change):
    model = {
        "inputs": {"src": "B S"},
        "args": {"d_model": 8, "heads": 2, "d_ff": 8, "vocab": 9},
        "graph": {"emb": {"block": "embedding", "in": "src"}, "attn": {"block": "attention"}},
    }
    with pytest.raises(ConfigError) as caught:
        check_model(
            {
                **model,
                **{
                    key: {**model.get(key, {}), **value} if isinstance(value, dict) and key in model else value
                    for key, value in change.items()
                },
            }
        )
    assert len(str(caught.value)) <= LONGEST and all(problem.help for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("fragment", "problems"),
    [
        (
            "{graph: {encoder: {layer: {attn: {block: latent_attention, d_latent: 8}}, at: {0: {ffn: {d_ff: 8}}}}}}",
            ["graph.encoder.layer.attn"] * 3,
        ),
        (
            "{graph: {encoder: {at: {0: {ffn: {d_ff: x}}, 1: {ffn: {d_ff: y}}}}}}",
            ["graph.encoder.at.0.ffn.d_ff", "graph.encoder.at.1.ffn.d_ff"],
        ),
        (
            "{graph: {both: {block: concat_sequence, in: [encoder, tgt_emb], before: tgt_pos}}}",
            ["graph.both", "graph.logits"],
        ),
        ("{graph: {decoder: {layer: {cross: {kv: null}}}}}", ["graph.encoder.layer.ffn"]),
    ],
)
def test_one_mistake_is_one_error_where_it_is_written(fragment, problems, tmp_path):
    addresses = [problem.address for problem in refused(fragment, tmp_path).problems]
    assert addresses == [f"model.{address}" for address in problems]


def test_the_help_for_a_leak_suggests_a_mask_only_if_the_block_has_one(tmp_path):
    for graph, address, help in (
        ("decoder: {layer: {self: {mask: null}}}", "decoder.layer.self", "write mask: causal on it"),
        ("peek: {block: look_ahead, before: decoder}", "peek", "look_ahead has no mask: remove it"),
    ):
        (problem,) = refused(f"{{graph: {{{graph}}}}}", tmp_path).problems
        assert problem.address == f"model.graph.{address}" and problem.help.startswith(help)


def test_a_misspelt_node_of_a_child_file_has_the_nearest_node(tmp_path):
    for fragment in (
        "{graph: {encoder: {at: {0: {fnn: {d_ff: 8}}}}}}",
        "{graph: {encoder: {layer: {fnn: {d_ff: 8}}}}}",
    ):
        (problem,) = refused(fragment, tmp_path).problems
        assert problem.help == "did you mean ffn? A new node needs block: NAME"


@pytest.mark.grid
def test_unknown_references_count_towards_the_limit_of_references(tmp_path):
    reads = ", ".join(["nowhere"] * 900)
    layer = f"{{ffn: {{in: {{block: sum, in: [{reads}]}}}}}}"
    problems = refused(f"{{graph: {{encoder: {{repeat: 1000, layer: {layer}}}}}}}", tmp_path).problems
    assert "expands to more than 30000 references" in {problem.rule for problem in problems}


def test_an_unknown_key_names_the_blocks_that_take_it(tmp_path):
    fragment = "{graph: {encoder: {layer: {attn: {block: restricted_attention, r: 2, d_ff: 8}}}}}"
    (problem,) = [one for one in refused(fragment, tmp_path).problems if "d_ff" in one.rule]
    takers = problem.help.partition("d_ff is an argument of ")[2].partition(";")[0]
    assert "gated_ffn" in takers.split(", ") and "did you mean" not in problem.help


def test_add_norm_on_the_last_node_is_to_be_removed_and_not_the_node_replaced(tmp_path):
    (problem,) = refused("{graph: {logits: {add_norm: {post: [norm]}}}}", tmp_path).problems
    assert problem.help == "write add_norm: none at logits, or leave the key out"
