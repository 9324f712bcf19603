"""Random models, written as mappings of the language."""

from hypothesis import strategies as st

from tests.blocks.test_contract import CASES

ARGS = {"d_model": 8, "d_ff": 12, "heads": 2, "r": 3, "vocab": 11}
PRESETS = ["post", "pre", "sandwich", "branch", "deepnorm", "rezero", "layerscale", "none"]
STEPS = [
    {"post": ["dropout", {"scale": 0.5}, "add"]},
    {"pre": ["norm"], "post": [{"droppath": 0.1}, {"gain": 0.5, "per": "channel"}, "add"], "last": ["norm"]},
    {"post": ["norm", {"add": 2}]},
    {"last": []},
]
STEPS_OF_NODES = [{when: steps for when, steps in one.items() if when != "last"} for one in STEPS]
NORMS = ["layernorm", "rmsnorm", {"block": "rmsnorm", "eps": 1e-4}]
ATTENTION = ["attention", "restricted_attention"]
MIXED = ["sum", "mean", "product", "weighted_sum"]
PLAIN = [
    {"block": "ffn"},
    {"block": "ffn", "d_ff": "2*d_model", "activation": "gelu"},
    {"block": "sinusoidal"},
    {"block": "learned_position", "max_length": 32},
    {"block": "none"},
    {"block": "dropout", "dropout": 0.1},
    {"block": "linear", "d_out": "d_model"},
    {"block": "layernorm"},
    {"block": "relu"},
]

GROWING = ("counted", "squared_relu", "xielu")  # six stacked layers overflow float32


def mixes_nothing_else(case):
    """Return True if a block reads vectors by its first port only and returns vectors of the same width."""
    info, (first, *_) = case.info, case.info.signature.ports
    plain = len(first.axes) == 3 and not first.many and not first.ids and info.signature.output == first.axes
    hosts_a_part = any(isinstance(value, dict) for value in case.arguments.values())
    return plain and list(case.ports) == [first.name] and info.name not in GROWING and not hosts_a_part


OTHERS = [case for case in CASES if mixes_nothing_else(case)]


class Writer:
    """Draw one model. `memories` are names of encoder stacks that a decoder can read."""

    def __init__(self, draw):
        self.draw = draw

    def one(self, options):
        return self.draw(st.sampled_from(options))

    def often(self, of=2):
        return self.draw(st.integers(1, of)) == 1

    def model(self):
        inputs = {name: axes for name, axes in {"src": "B S", "img": "B P 6"}.items() if self.often()}
        if not inputs or self.often(4) is False:
            inputs["tgt"] = "B T"
        if "src" in inputs and self.often(3):
            inputs["seg"] = "B S"  # a second input on one axis
        graph, memories = {}, []
        for name in [one for one in inputs if one not in ("tgt", "seg")]:
            memories.append(self.source(graph, name, inputs))
        if "tgt" in inputs:
            self.side(graph, "tgt", {"block": "embedding", "in": "tgt"}, memories)
        for name, _ in memories:
            if f"'{name}" not in str(list(graph.values())) and list(graph)[-1] != name:
                graph[f"{name}_read"] = {"block": "pool", "kv": name}
        head = [{"block": "linear", "d_out": "d_model"}, {"block": "gelu"}, {"block": "layernorm"}]
        branch = {"map": dict(head[0])}
        head += [{"join": "sum", "parallel": branch}, {"join": "sum", "repeat": 1, "layer": branch}]
        for number in range(self.draw(st.integers(0, 2))):
            graph[f"head_{number}"] = self.one(head)
        graph["logits"] = {"block": "unembed"}
        args = {**ARGS, "norm": self.one(NORMS)}
        return {"inputs": inputs, "args": args, "add_norm": self.one(PRESETS), "graph": graph}

    def source(self, graph, name, inputs):
        first = (
            {"block": "embedding", "in": name} if name != "img" else {"block": "linear", "d_out": "d_model", "in": name}
        )
        if name == "src" and "seg" in inputs:
            graph["word"], graph["segment"] = first, {"block": "embedding", "vocab": 3, "in": "seg"}
            first = {"block": "sum", "in": ["word", "segment"]}
        return self.side(graph, name, first, [])

    def side(self, graph, name, first, memories):
        """Write embeddings, positions and one or two stacks; return the name of the last node and its number of layers."""
        graph[f"{name}_emb"] = first
        if self.often():
            graph[f"{name}_pos"] = self.one(PLAIN[2:5])
        decodes = name == "tgt"
        repeat = self.draw(st.integers(1, 3))
        stack = {"repeat": repeat, "layer": self.layer(decodes, memories)}
        if self.often(5):
            stack["repeat"] = {"times": repeat, "share": True}
        elif self.often(4):
            stack["at"] = {self.one([0, -1]): {"extra": self.one(PLAIN[:2])}}
        if self.often(4):
            stack["add_norm"] = self.one([*PRESETS, *STEPS])
        if self.often(5):
            stack["args"] = {"heads": 4, "d_ff": "d_model*2", "norm": self.one(NORMS)}
        graph[f"{name}_stack"] = stack
        return f"{name}_stack", repeat

    def layer(self, decodes, memories, depth=0):
        graph = {}
        for number in range(self.draw(st.integers(1, 3))):
            name = f"node_{number}"
            graph[name] = self.node(graph, decodes, memories, depth)
        return graph

    def node(self, graph, decodes, memories, depth):
        kinds = ["attend", "attend", "plain", "plain", "other", "other"] + ["cross", "cross"] * bool(memories)
        kinds += ["parallel", "copies", "stack"] * (depth < 2) + ["mix"] * bool(graph)
        kinds += ["same"] * any(node.get("block") in ("ffn", "linear") for node in graph.values()) + ["shift"]
        kind = self.one(kinds)
        node = getattr(self, f"_{kind}")(graph, decodes, memories, depth)
        if "block" in node and node["block"] in ("ffn", *ATTENTION) and self.often(6):
            node["add_norm"] = self.one([*PRESETS, *STEPS_OF_NODES])
        return node

    def _attend(self, graph, decodes, memories, depth):
        node = {"block": self.one(ATTENTION)}
        if decodes and not self.often(20):
            node["mask"] = "causal"
        return node

    def _other(self, graph, decodes, memories, depth):
        """Return a registered block of one input, causal if it has a mask and decodes."""
        case = self.one(OTHERS)
        masks = {one.name: "causal" for one in case.info.arguments.values() if "causal" in one.kind.options}
        return {"block": case.info.name, **case.arguments, **(masks if decodes else {})}

    def _shift(self, graph, decodes, memories, depth):
        return {"block": "shift"}

    def _plain(self, graph, decodes, memories, depth):
        return dict(self.one(PLAIN))

    def _cross(self, graph, decodes, memories, depth):
        """Return attention to an encoder stack: its output, a layer, or a weighted sum of all layers."""
        name, layers = self.one(memories)
        index = self.one(["0", "-1", str(layers - 1), f"(i%{layers})", f"({layers}-1-i%{layers})"])
        mixed = {"block": "weighted_sum", "in": f"{name}.*"}
        kv = self.one([name, f"{name}.{index}", mixed, {"block": "ffn", "in": name}])
        return {"block": self.one(["attention", "pool"]), "kv": kv}

    def _mix(self, graph, decodes, memories, depth):
        others = [list(graph)[-1], self.one(["entry", *graph])]
        return {"block": self.one(MIXED), "in": [*others, {"block": "linear", "d_out": "d_model", "in": "entry"}]}

    def _same(self, graph, decodes, memories, depth):
        return {"same": self.one([name for name, node in graph.items() if node.get("block") in ("ffn", "linear")])}

    def _parallel(self, graph, decodes, memories, depth):
        return {"join": self.join(), "parallel": self.layer(decodes, memories, depth + 1)}

    def _copies(self, graph, decodes, memories, depth):
        layer = self.layer(decodes, memories, depth + 1)
        return {"join": self.join(), "repeat": self.draw(st.integers(1, 3)), "layer": layer}

    def _stack(self, graph, decodes, memories, depth):
        return {"repeat": self.draw(st.integers(1, 2)), "layer": self.layer(decodes, memories, depth + 1)}

    def join(self):
        return self.one(["sum", "mean", "product", "gate", {"block": "gate"}])


@st.composite
def models(draw):
    return Writer(draw).model()
