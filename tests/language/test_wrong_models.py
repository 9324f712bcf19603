"""A table of wrong models: each error has the address, the exact rule, a place in the file and a fix, and fits a screen."""

import pytest

from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model

SCREEN = 24  # lines
LONGEST = 2000  # characters

WRONG = {
    "misspelt key": (
        "{graph: {encoder: {layer: {attn: {haeds: 4}}}}}",
        "model.graph.encoder.layer.attn.haeds",
        "unknown key 'haeds'",
    ),
    "misspelt block": (
        "{graph: {encoder: {layer: {ffn: {block: fnn}}}}}",
        "model.graph.encoder.layer.ffn.block",
        "no block is called 'fnn'",
    ),
    "misspelt part of a model": (
        "{grpah: {x: {block: ffn}}}",
        "model.grpah",
        "unknown key 'grpah'",
    ),
    "misspelt key of a stack": (
        "{graph: {encoder: {repaet: 2}}}",
        "model.graph.encoder.repaet",
        "unknown key 'repaet'",
    ),
    "misspelt arg of a layer": (
        "{graph: {encoder: {args: {haeds: 4}}}}",
        "model.graph.encoder.args.haeds",
        "no block takes 'haeds' from here",
    ),
    "misspelt step": (
        "{add_norm: {post: [dropuot, add]}}",
        "model.add_norm",
        "add_norm post has the unknown operation 'dropuot'; did you mean dropout? one of: add, dropout, droppath, gain, norm, scale",
    ),
    "misspelt preset": (
        "{add_norm: pst}",
        "model.add_norm",
        "'pst' is not an add & norm preset; did you mean post? one of: branch, deepnorm, layerscale, none, post, pre, rezero, sandwich",
    ),
    "misspelt norm": (
        "{args: {norm: rmsnrom}}",
        "model.args.norm",
        "no norm is called 'rmsnrom'",
    ),
    "misspelt argument of a norm": (
        "{args: {norm: {block: rmsnorm, esp: 1e-3}}}",
        "model.args.norm.esp",
        "rmsnorm has no argument 'esp'",
    ),
    "misspelt activation": (
        "{args: {activation: rleu}}",
        "model.args.activation",
        "no activation is called 'rleu'",
    ),
    "misspelt join": (
        "{graph: {encoder: {join: smu}}}",
        "model.graph.encoder.join",
        "no join is called 'smu'",
    ),
    "argument of a join that has none": (
        "{graph: {encoder: {join: {block: sum, weight: 2}}}}",
        "model.graph.encoder.join.weight",
        "unknown key 'weight'",
    ),
    "two forms": (
        "{graph: {encoder: {same: src_emb}}}",
        "model.graph.encoder",
        "a node must have exactly one of block, same, layer, parallel, but this has same and layer",
    ),
    "no form": (
        "{graph: {encoder: {layer: {more: {heads: 4}}}}}",
        "model.graph.encoder.layer.more",
        "a node must have exactly one of block, same, layer, parallel, but this has none of them",
    ),
    "a node that is text": (
        "{graph: {encoder: {layer: {attn: attention}}}}",
        "model.graph.encoder.layer.attn",
        "must be a mapping, but is 'attention'",
    ),
    "a layer that is a list": (
        "{graph: {more: {layer: [ffn], before: encoder}}}",
        "model.graph.more.layer",
        "must be a mapping, but is ['ffn']",
    ),
    "a layer without nodes": (
        "{graph: {encoder: {layer: {attn: null, ffn: null}}}}",
        "model.graph.encoder.layer",
        "has no nodes",
    ),
    "a model without a graph": (
        "{graph: {src_emb: null, src_pos: null, encoder: null, tgt_emb: null, tgt_pos: null, decoder: null, logits: null}}",
        "model.graph",
        "is missing or empty",
    ),
    "a block that is a list": (
        "{graph: {encoder: {layer: {ffn: {block: [ffn]}}}}}",
        "model.graph.encoder.layer.ffn.block",
        "no block is called ['ffn']",
    ),
    "a parallel without a join": (
        "{graph: {both: {parallel: {a: {block: ffn}, b: {block: ffn}}, before: tgt_emb}, encoder: null}}",
        "model.graph.both",
        "parallel needs join, which combines its branches",
    ),
    "copies that share their weights": (
        "{graph: {encoder: {repeat: {times: 2, share: true}, join: sum}}}",
        "model.graph.encoder.join",
        "join combines parallel copies, and copies that share their weights are identical",
    ),
    "share that is neither true nor false": (
        "{graph: {encoder: {repeat: {times: 2, share: 1}}}}",
        "model.graph.encoder.repeat.share",
        "must be true or false, but is 1",
    ),
    "repeat without times": (
        "{graph: {more: {repeat: {share: true}, layer: {f: {block: ffn}}, before: tgt_emb}}}",
        "model.graph.more.repeat",
        "needs times",
    ),
    "repeat of nothing": (
        "{graph: {encoder: {repeat: 0}}}",
        "model.graph.encoder.repeat",
        "repeat must be between 1 and 1000, but is 0",
    ),
    "repeat of text": (
        "{graph: {encoder: {repeat: six}}}",
        "model.graph.encoder.repeat",
        "repeat needs the unknown arg 'six'; one of: d_ff, d_model, dropout, heads, vocab",
    ),
    "at in a layer that shares": (
        "{graph: {encoder: {repeat: {times: 4, share: true}, at: {0: {ffn: null}}}}}",
        "model.graph.encoder.at",
        "changes single layers, but with share: true all layers are identical",
    ),
    "at of a layer that is not there": (
        "{graph: {encoder: {at: {9: {ffn: null}}}}}",
        "model.graph.encoder.at.9",
        "there is no layer 9: the layers are 0 to 3",
    ),
    "at of no index": (
        "{graph: {encoder: {at: {first: {ffn: null}}}}}",
        "model.graph.encoder.at.first",
        "'first' is not the index of a layer",
    ),
    "at of one layer from both ends": (
        "{graph: {encoder: {at: {0: {ffn: null}, -4: {attn: null}}}}}",
        "model.graph.encoder.at",
        "lists layer 0 of 4 twice: 0 and -4",
    ),
    "at that is no mapping": (
        "{graph: {encoder: {at: {0: ffn}}}}",
        "model.graph.encoder.at.0",
        "must be a mapping, but is 'ffn'",
    ),
    "i in a layer that shares": (
        "{graph: {encoder: {repeat: {times: 2, share: true}, layer: {ffn: {d_ff: 8*(i+1)}}}}}",
        "model.graph.encoder.layer.ffn.d_ff",
        "d_ff needs the unknown arg 'i'; i and n belong to layers that are repeated and do not share their weights",
    ),
    "i outside of layers": (
        "{args: {vocab: 8*i}}",
        "model.args.vocab",
        "vocab needs the unknown arg 'i'; i and n belong to layers that are repeated and do not share their weights",
    ),
    "an arg called i": (
        "{args: {i: 4}}",
        "model.args.i",
        "i is the index of layers in arithmetic",
    ),
    "an arg called n": (
        "{graph: {encoder: {args: {n: 4}}}}",
        "model.graph.encoder.args.n",
        "n is the number of layers in arithmetic",
    ),
    "a node called like a method": (
        "{graph: {train: {block: ffn, before: encoder}}}",
        "model.graph.train",
        "'train' is an attribute name of modules",
    ),
    "a node called like a class": (
        "{graph: {__class__: {block: ffn, before: encoder}}}",
        "model.graph.__class__",
        "'__class__' is an attribute name of modules",
    ),
    "a node called like an attribute": (
        "{graph: {_modules: {block: ffn, before: encoder}}}",
        "model.graph._modules",
        "'_modules' is an attribute name of modules",
    ),
    "a node called like a word": (
        "{graph: {entry: {block: ffn, before: encoder}}}",
        "model.graph.entry",
        "'entry' is a reserved word",
    ),
    "a node called like an input": (
        "{graph: {src: {block: ffn, before: encoder}}}",
        "model.graph.src",
        "src is already an input",
    ),
    "a node with a space": (
        "{graph: {my ffn: {block: ffn, before: encoder}}}",
        "model.graph.my ffn",
        "a name consists of letters, digits and _, but is 'my ffn'",
    ),
    "an input called like a word": (
        "{inputs: {entry: B P}}",
        "model.inputs.entry",
        "'entry' is a reserved word",
    ),
    "an input that masks are given by": (
        "{inputs: {keep: B P}}",
        "model.inputs.keep",
        "'keep' is a reserved word",
    ),
    "axes in lower case": (
        "{inputs: {src: b s}}",
        "model.inputs.src",
        "the axes must be upper-case letters and widths, batch first, but are 'b s'",
    ),
    "axes that repeat": (
        "{inputs: {src: B B}}",
        "model.inputs.src",
        "the axes must be upper-case letters and widths, batch first, but are 'B B'",
    ),
    "one axis": (
        "{inputs: {src: B}}",
        "model.inputs.src",
        "the axes must be upper-case letters and widths, batch first, but are 'B'",
    ),
    "inputs of two batches": (
        "{inputs: {src: A S}}",
        "model.inputs",
        "the first axis of all inputs is the batch, but they have A, B",
    ),
    "an input that nothing reads": (
        "{inputs: {doc: B P}}",
        "model.inputs.doc",
        "no node reads this input",
    ),
    "an input on the axis of the target": (
        "{inputs: {src: B T}}",
        "model.inputs.src",
        "uses the axis of tgt, whose tokens are predicted",
    ),
    "a target of vectors": (
        "{inputs: {tgt: B T 8}, graph: {tgt_emb: {same: null, block: linear, d_out: 128}}}",
        "model.inputs.tgt",
        "tgt is predicted token by token, so it must hold token ids",
    ),
    "a reference to nothing": (
        "{graph: {decoder: {layer: {cross: {kv: encodr}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "'encodr' is neither an input nor an earlier node that can be read here",
    ),
    "a reference backwards in time": (
        "{graph: {encoder: {in: decoder}}}",
        "model.graph.encoder.in",
        "'decoder' is neither an input nor an earlier node that can be read here",
    ),
    "a reference to the stack that the node is in": (
        "{graph: {decoder: {layer: {cross: {kv: decoder.(i-1)}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "'decoder' contains this node, so its output does not exist yet",
    ),
    "a reference that is a number": (
        "{graph: {decoder: {layer: {cross: {kv: 3}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "must name an input, an earlier node, or a layer of a stack (encoder.0), but is 3",
    ),
    "a reference to a layer that is not there": (
        "{graph: {decoder: {layer: {cross: {kv: encoder.9}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "encoder.9 is layer 9, but encoder has layers 0 to 3",
    ),
    "a reference to a layer of a block": (
        "{graph: {decoder: {layer: {cross: {kv: src_emb.0}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "src_emb has no layers: src_emb.0 needs a stack, which is a layer with repeat",
    ),
    "a reference by a fraction": (
        "{graph: {decoder: {layer: {cross: {kv: encoder.(i/2)}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "encoder.(i/2) is layer 0.0, but encoder has layers 0 to 3",
    ),
    "a reference with a leading zero": (
        "{graph: {decoder: {layer: {cross: {kv: encoder.00}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "must name an input, an earlier node, or a layer of a stack (encoder.0), but is 'encoder.00'",
    ),
    "all layers where one is read": (
        "{graph: {decoder: {layer: {cross: {kv: encoder.*}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "kv reads one tensor, but has 4: encoder.0.ffn, encoder.1.ffn, encoder.2.ffn, …",
    ),
    "a list where one is read": (
        "{graph: {decoder: {layer: {cross: {kv: [encoder, src_emb]}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "reads one tensor, but is ['encoder', 'src_emb']",
    ),
    "an inner node from outside": (
        "{graph: {decoder: {layer: {cross: {kv: attn}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "'attn' is neither an input nor an earlier node that can be read here",
    ),
    "an inline stack": (
        "{graph: {decoder: {layer: {cross: {kv: {layer: {f: {block: ffn}}}}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "an inline node must be a block: {block: NAME, in: …}",
    ),
    "an inline node that is placed": (
        "{graph: {decoder: {layer: {cross: {kv: {block: ffn, in: encoder, before: ffn}}}}}}",
        "model.graph.decoder.layer.cross.kv",
        "an inline node must be a block: {block: NAME, in: …}",
    ),
    "before and after": (
        "{graph: {encoder: {layer: {more: {block: ffn, before: attn, after: ffn}}}}}",
        "model.graph.encoder.layer.more",
        "has both before and after, which exclude each other",
    ),
    "before what is not there": (
        "{graph: {encoder: {layer: {more: {block: ffn, before: atn}}}}}",
        "model.graph.encoder.layer.more.before",
        "there is no node 'atn' in this graph",
    ),
    "before a list": (
        "{graph: {encoder: {layer: {more: {block: ffn, before: [attn]}}}}}",
        "model.graph.encoder.layer.more.before",
        "there is no node ['attn'] in this graph",
    ),
    "after itself": (
        "{graph: {encoder: {layer: {more: {block: ffn, after: more}}}}}",
        "model.graph.encoder.layer.more.after",
        "there is no node 'more' in this graph",
    ),
    "same of a stack": (
        "{graph: {tgt_pos: {block: null, same: encoder}}}",
        "model.graph.tgt_pos.same",
        "'encoder' is not a block: same calls the module of an earlier block again",
    ),
    "same of a stack whose last node has that name": (
        "{graph: {tgt_pos: {block: null, same: ffn}}}",
        "model.graph.tgt_pos.same",
        "'ffn' is neither an input nor an earlier node that can be read here",
    ),
    "same with an argument": (
        "{graph: {tgt_emb: {d_model: 4}}}",
        "model.graph.tgt_emb.d_model",
        "unknown key 'd_model': same takes inputs only",
    ),
    "same at another width": (
        "{graph: {wide: {block: embedding, d_model: 64, in: src, before: tgt_emb}, again: {same: src_pos, in: wide, before: tgt_emb}, back: {block: linear, d_out: 128, before: tgt_emb}, decoder: {layer: {more: {block: attention, kv: back}}}}}",
        "model.graph.again",
        "the module of src_pos does not fit: D is 64 here, but 128 at src_pos",
    ),
    "tied to what cannot be tied": (
        "{graph: {logits: {tie: src_pos}}}",
        "model.graph.logits.tie",
        "'src_pos' has no parameter that can be tied",
    ),
    "tied to another size": (
        "{graph: {logits: {vocab: 300}}}",
        "model.graph.logits",
        "cannot be tied to src_emb: its matrix is [300, 128], the matrix of src_emb is [10000, 128]",
    ),
    "tie on a block without": (
        "{graph: {src_pos: {tie: src_emb}}}",
        "model.graph.src_pos.tie",
        "unknown key 'tie'",
    ),
    "a dead node": (
        "{graph: {aside: {block: ffn, in: encoder, before: tgt_emb}}}",
        "model.graph.aside",
        "nothing reads the output of aside",
    ),
    "nothing to read": (
        "{graph: {src_emb: {in: null}}}",
        "model.graph.src_emb",
        "the first node has no earlier node to read",
    ),
    "a missing argument": (
        "{args: {d_ff: null}}",
        "model.graph.encoder.layer.ffn",
        "ffn needs the argument d_ff (int)",
    ),
    "a missing port": (
        "{graph: {encoder: {layer: {attn: {block: gate}}}}}",
        "model.graph.encoder.layer.attn",
        "gate needs the input ys",
    ),
    "a fraction of heads": (
        "{args: {heads: 2.5}}",
        "model.args.heads",
        "heads must be an int, but is 2.5: // divides and rounds down",
    ),
    "a division of heads": (
        "{args: {heads: d_model/32}}",
        "model.args.heads",
        "heads must be an int, but is 4.0: write 4, or // for a division",
    ),
    "heads that do not divide": (
        "{args: {heads: 7}}",
        "model.graph.encoder.layer.attn",
        "the width must split evenly into heads (D % heads == 0), but D = 128 (the width of src_pos), heads = 7",
    ),
    "no heads": (
        "{args: {heads: 0}}",
        "model.graph.encoder.layer.attn",
        "there is at least one head (heads >= 1), but heads = 0",
    ),
    "heads that are a list": (
        "{args: {heads: [4]}}",
        "model.args.heads",
        "heads must be an int, but is [4]",
    ),
    "arithmetic with a call": (
        "{args: {heads: abs(4)}}",
        "model.args.heads",
        "heads can hold numbers, names, + - * / // % and parentheses",
    ),
    "arithmetic with text": (
        "{args: {heads: 'four heads'}}",
        "model.args.heads",
        "heads 'four heads' is neither a number nor arithmetic",
    ),
    "arithmetic with an unknown name": (
        "{args: {heads: d_modle//32}}",
        "model.args.heads",
        "heads needs the unknown arg 'd_modle'; did you mean d_model? one of: d_ff, d_model, dropout, heads, vocab",
    ),
    "division by zero": (
        "{args: {heads: d_model//0}}",
        "model.args.heads",
        "heads divides by zero",
    ),
    "a circle of args": (
        "{args: {d_ff: heads, heads: d_ff}}",
        "model.args.heads",
        "heads refers to itself: d_ff → heads → d_ff",
    ),
    "an arg that is no number": (
        "{args: {heads: 2*mask, mask: causal}}",
        "model.args.heads",
        "heads needs the unknown arg 'causal'; one of: d_ff, d_model, dropout, heads, mask, vocab",
    ),
    "numbers beyond bounds": (
        "{args: {d_ff: 1048576*1048577}}",
        "model.args.d_ff",
        "d_ff integers go up to 2^40, but this is 1099512676352",
    ),
    "arithmetic of 100 characters": (
        "{args: {heads: 1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1}}",
        "model.args.heads",
        "heads arithmetic has at most 80 characters, but this has 99",
    ),
    "a rate of one": (
        "{args: {dropout: 1}}",
        "model.args.dropout",
        "dropout must be from 0 to below 1, but is 1.0",
    ),
    "a rate that is a word": (
        "{args: {attention_dropout: much}}",
        "model.args.attention_dropout",
        "attention_dropout needs the unknown arg 'much'; one of: attention_dropout, d_ff, d_model, dropout, heads, vocab",
    ),
    "an option that is none": (
        "{graph: {decoder: {layer: {self: {mask: casual}}}}}",
        "model.graph.decoder.layer.self.mask",
        "mask must be one of causal, or null, but is 'casual'",
    ),
    "a mask on another sequence": (
        "{graph: {decoder: {layer: {cross: {mask: causal}}}}}",
        "model.graph.decoder.layer.cross",
        "mask: causal orders the positions of one sequence, but kv is another: leave one of them out",
    ),
    "a mask that is missing": (
        "{graph: {decoder: {layer: {self: {mask: null}}}}}",
        "model.graph.decoder.layer.self",
        "an output position sees later target tokens, so the model would copy instead of predict",
    ),
    "an eps below 0": (
        "{args: {norm: {block: layernorm, eps: -1}}}",
        "model.graph.encoder.layer.attn",
        "a variance may be 0 (eps > 0), but eps = -1.0",
    ),
    "a category that is a list": (
        "{args: {norm: [layernorm]}}",
        "model.args.norm",
        "no norm is called ['layernorm']",
    ),
    "a block that is no norm": (
        "{args: {norm: ffn}}",
        "model.args.norm",
        "no norm is called 'ffn'",
    ),
    "steps twice": (
        "{add_norm: {post: [norm, add, norm]}}",
        "model.add_norm",
        "add_norm post lists an operation twice: norm, add, norm",
    ),
    "add before the block": (
        "{add_norm: {pre: [add]}}",
        "model.add_norm",
        "add_norm pre cannot add: the residual is added to a branch's output, in post",
    ),
    "a step without its number": (
        "{add_norm: {post: [scale, add]}}",
        "model.add_norm",
        "add_norm post has the operation scale without its number: write {scale: 0.5}",
    ),
    "a step with two numbers": (
        "{add_norm: {post: [{scale: 1, gain: 2}]}}",
        "model.add_norm",
        "add_norm post has {'scale': 1, 'gain': 2}: an operation with a number is one of scale, gain, droppath, add",
    ),
    "a step with a word": (
        "{add_norm: {post: [{scale: half}, add]}}",
        "model.add_norm.scale",
        "scale needs the unknown arg 'half'; one of: d_ff, d_model, dropout, heads, vocab",
    ),
    "a scale per channel": (
        "{add_norm: {post: [{scale: 0.5, per: channel}, add]}}",
        "model.add_norm",
        "add_norm post has {'scale': 0.5, 'per': 'channel'}: only a gain is per channel or per branch",
    ),
    "steps that are a word": (
        "{add_norm: {post: norm}}",
        "model.add_norm",
        "add_norm post must be a list of operations (dropout, add, norm, scale, gain, droppath), but is 'norm'",
    ),
    "a key of add_norm": (
        "{add_norm: {pots: [norm]}}",
        "model.add_norm",
        "add_norm has no key 'pots'; did you mean post? one of: last, post, pre",
    ),
    "add_norm that is a list": (
        "{add_norm: [norm]}",
        "model.add_norm",
        "add_norm must be a preset (post, pre, sandwich, branch, deepnorm, rezero, layerscale, none) or a mapping of pre, post, last, but is ['norm']",
    ),
    "droppath of one": (
        "{add_norm: {post: [{droppath: 1}, add]}}",
        "model.add_norm.droppath",
        "droppath must be from 0 to below 1, but is 1.0",
    ),
    "a residual of another width": (
        "{graph: {encoder: {layer: {out: {block: unembed, vocab: 64, add_norm: post}}}}}",
        "model.graph.encoder.layer.out",
        "its output B S 64 cannot be added to its input B S 128: a residual must keep the shape",
    ),
    "a stack that changes the width": (
        "{graph: {encoder: {layer: {out: {block: linear, d_out: 64}}}}}",
        "model.graph.encoder",
        "a repeated layer must keep the shape, but this turns B S 128 into B S 64",
    ),
    "ids where vectors belong": (
        "{graph: {src_pos: {in: src}, src_emb: null, tgt_emb: {same: null, block: embedding}, logits: {tie: null}}}",
        "model.graph.src_pos",
        "x of sinusoidal reads vectors, but src is B S of token ids",
    ),
    "vectors where ids belong": (
        "{graph: {src_pos: {block: embedding}}}",
        "model.graph.src_pos",
        "x of embedding reads token ids, but src_emb is B S 128",
    ),
    "dropout on ids": (
        "{graph: {src_emb: {in: drop}, drop: {block: dropout, in: src, before: src_emb}}}",
        "model.graph.drop",
        "x of dropout reads vectors, but src is B S of token ids",
    ),
    "add & norm of ids": (
        "{graph: {src_emb: {add_norm: post}}}",
        "model.graph.src_emb",
        "its output B S 128 cannot be added to its input B S: a residual must keep the shape",
    ),
    "branches of two widths": (
        "{graph: {both: {join: sum, parallel: {a: {block: ffn}, b: {block: linear, d_out: 64}}, before: encoder}}}",
        "model.graph.both",
        "D is 128 in both.a, but 64 in both.b (B S 64)",
    ),
    "sequences of two axes": (
        "{graph: {both: {block: sum, in: [encoder, tgt_emb], before: tgt_pos}}}",
        "model.graph.both",
        "N is S in encoder.3.ffn, but T in tgt_emb (B T 128)",
    ),
    "operations before several tensors": (
        "{graph: {both: {block: sum, in: [encoder, encoder], add_norm: {pre: [{scale: 0.5}]}, before: tgt_emb}}}",
        "model.graph.both.add_norm",
        "has add & norm operations before sum, whose first port takes several tensors",
    ),
    "the target end to end with a source": (
        "{graph: {both: {block: concat_sequence, in: [encoder, tgt_emb], before: tgt_pos}}}",
        "model.graph.both",
        "concatenates tgt with another sequence, which cannot be decoded token by token",
    ),
    "a gate of what it does not read": (
        "{graph: {encoder: {layer: {ffn: {block: gate, ys: [attn, src_emb, tgt]}}}}}",
        "model.graph.encoder.layer.ffn",
        "ys of gate reads vectors, but tgt is B T of token ids",
    ),
    "no head": (
        "{graph: {logits: null}}",
        "model.graph.decoder.layer.ffn",
        "the last node must treat each position of tgt separately, without add & norm",
    ),
    "attention at the end": (
        "{graph: {logits: {block: attention, mask: causal, vocab: null, tie: null}}}",
        "model.graph.logits",
        "the last node must treat each position of tgt separately, without add & norm",
    ),
    "a null arg": (
        "{args: {vocab: null}}",
        "model.graph.src_emb",
        "embedding needs the argument vocab (int)",
    ),
    "sizes beyond all memory": (
        "{args: {d_model: 1099511627776}}",
        "model.graph.encoder.layer.attn",
        "Storage size calculation overflowed with sizes=[3298534883328, 1099511627776]",
    ),
}


def refused(fragment, folder):
    """Return the error of a child of the model tiny whose file contains `fragment`."""
    file = folder / "mine.yaml"
    file.write_text(f"# @package _global_\ndefaults: [tiny, _self_]\nmodel: {fragment}\n")
    with pytest.raises(ConfigError) as caught:
        composed = compose_model(str(file))
        check_model(composed.model, composed.sources)
    return caught.value


@pytest.mark.parametrize(("fragment", "address", "rule"), WRONG.values(), ids=WRONG)
def test_a_wrong_model_is_an_error_with_address_rule_and_fix(fragment, address, rule, tmp_path):
    error = refused(fragment, tmp_path)
    first = error.problems[0]
    assert (first.address, first.rule) == (address, rule)
    assert all(problem.help and problem.place for problem in error.problems)
    assert len(str(error)) <= LONGEST and len(str(error).splitlines()) <= SCREEN


def test_at_least_sixty_mistakes_are_in_the_table():
    assert len(WRONG) >= 60


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


def test_an_unknown_key_names_the_blocks_that_take_it(tmp_path):
    fragment = "{graph: {encoder: {layer: {attn: {block: restricted_attention, r: 2, d_ff: 8}}}}}"
    (problem,) = [one for one in refused(fragment, tmp_path).problems if "d_ff" in one.rule]
    takers = problem.help.partition("d_ff is an argument of ")[2].partition(";")[0]
    assert "gated_ffn" in takers.split(", ") and "did you mean" not in problem.help


def test_add_norm_on_the_last_node_is_to_be_removed_and_not_the_node_replaced(tmp_path):
    (problem,) = refused("{graph: {logits: {add_norm: {post: [norm]}}}}", tmp_path).problems
    assert problem.help == "write add_norm: none at logits, or leave the key out"
