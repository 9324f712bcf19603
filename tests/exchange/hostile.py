"""Folders that try to run code or to write elsewhere, through import, export, load, eject, figure and report.

    python -m tests.exchange.hostile FOLDER COUNT SEED

prints as JSON, in its last line, how many folders were tried and how many commands accepted them, and every fault: an event of the audit
hook (PEP 578), a traceback, a change outside the output, or an output of a command that failed. FOLDER is empty.
"""

import json
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from random import Random

from safetensors.torch import load_file, save_file

from tests.damage import ODD, run_command, spoil
from tests.exchange.published import publish

COMMANDS = ("ruff", Path(sys.executable).name)  # ours: the formatter, and the trial of a tokenizer
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn")
REMOTE = ("socket.connect", "socket.getaddrinfo", "pickle.find_class", "marshal.loads", "ctypes.dlopen")
MODULES = ("evil", "modeling_tfm_blocks", "model", "modeling_gpt2", "torch", "tokenizers", "sitecustomize", "conftest")
PATHS = [
    "../x",
    "../../x.py",
    "/SANDBOX/x",
    "evil.py",
    "modeling_tfm_blocks.py",
    "model.py",
    "a/b",
    "",
    ".",
    "..",
    "/",
    "x\0y",
]
PATHS += [
    "~/x",
    "./config.json",
    "../run/weights.safetensors",
    "evil.safetensors/../../x",
    "certificate.json",
    "con\n.json",
    "é",
]
NAMES = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoTokenizer", "AutoModel")
TARGETS = [
    "evil.Evil",
    "theirs--evil.Evil",
    "../evil.Evil",
    "modeling_tfm_blocks.TfmBlocksConfig",
    "model.Model",
    "SANDBOX/evil.Evil",
]


class Hook:
    """Collect the events that the content of a folder must not cause. Writing is allowed in `outputs`."""

    def __init__(self, root):
        self.root, self.on, self.events, self.outputs = str(root), False, [], ()
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.on and (reason := self._fault(event, arguments)):
            self.events.append(f"{event} {reason} {str(arguments)[:200]}")

    def _fault(self, event, arguments):
        if event == "open":
            path, mode, flags = arguments
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or set(mode or "") & set("wax+")
            return writes and isinstance(path, (str, bytes)) and not self._allowed(os.fsdecode(path)) and "writes"
        if event == "exec":
            return self._foreign(arguments[0].co_filename) and "runs"
        if event == "compile":
            return (
                b"HARM" in (arguments[0] or b"" if isinstance(arguments[0], bytes) else str(arguments[0]).encode())
                and "compiles"
            )
        if event == "import":
            return (str(arguments[0]).split(".")[0] == "evil" or self._foreign(str(arguments[1]))) and "imports"
        if event.startswith(STARTS):
            return Path(str(arguments[0])).name not in COMMANDS and "starts"
        return event.startswith(REMOTE) and "reaches"

    def _allowed(self, path):
        path = os.path.realpath(path)
        return path == os.devnull or any(path == output or path.startswith(f"{output}/") for output in self.outputs)

    def _foreign(self, name):
        """Return True for a file of the sandbox, except in the cache in which transformers copies our own code.

        Code that torch generates is named `<eval_with_key>.1 from FILE of torch`.
        """
        path = os.path.realpath(name) if os.sep in name and not name.startswith("<") else ""
        return path.startswith(f"{self.root}/") and not path.startswith(f"{self.root}/hf/modules/")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def code_of(root):
    return f"HARM = open({str(root / 'harmed')!r}, 'w')\nclass Evil:\n    pass\nEvilConfig = Model = TfmBlocksConfig = Evil\n"


def read(path):
    return json.loads(path.read_text("utf-8"))


def write(path, value):
    path.write_text(json.dumps(value), "utf-8")


def change(path, values):
    write(path, (read(path) if path.exists() else {}) | values)


class Attack:
    """Change a folder in one way, which `__call__` returns as text."""

    def __init__(self, root, random):
        self.root, self.random = root, random

    def on_folder(self, folder):
        """Change the folder of a published model."""
        for module in MODULES:
            (folder / f"{module}.py").write_text(code_of(self.root))
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(self.root / "harmed")))
        kind = self.random.choice(("code", "code", "code", "spoil", "index", "metadata", "files", "template"))
        return f"{kind}: {getattr(self, f'_{kind}')(folder)}"

    def on_run(self, run):
        """Change a run folder that was imported."""
        for module in MODULES:
            (run / f"{module}.py").write_text(code_of(self.root))
        kind = self.random.choice(("text_name", "text", "tensor", "file_name", "file", "plugins", "yaml", "spoil_run"))
        return f"{kind}: {getattr(self, f'_{kind}')(run)}"

    def _target(self):
        return self.random.choice(TARGETS).replace("SANDBOX", str(self.root))

    def _path(self):
        return self.random.choice(PATHS).replace("SANDBOX", str(self.root)[1:])

    def _keys(self):
        target = self._target()
        maps = [dict.fromkeys(CLASSES, target), [target, None], {"AutoTokenizer": [target, target]}, target]
        return self.random.choice(
            [
                {"auto_map": self.random.choice(maps)},
                {"auto_map": maps[0], "trust_remote_code": True, "model_type": "evil"},
                {"custom_pipelines": {"evil": {"impl": target, "pt": ["AutoModel"]}}, "auto_map": maps[0]},
                {"custom_generate": target, "trust_remote_code": True},
                {self.random.choice(("attn_implementation", "_attn_implementation")): "theirs/evil:kernel"},
                {"_attn_implementation_internal": "theirs/evil", "experts_implementation": "theirs/evil"},
                {"architectures": [target]},
                {"tokenizer_class": target, "processor_class": target},
                {"text_config": {"auto_map": maps[0]}, "_name_or_path": "theirs/evil"},
                {"tokenizer_file": str(self.root / "evil.json"), "vocab_file": "../evil", "auto_map": maps[0]},
                {"quantization_config": {"quant_method": "evil", "modules": target}},
                {"base_model_name_or_path": "theirs/evil", "peft_type": target, "code_revision": "main"},
            ]
        )

    def _code(self, folder):
        name, keys = self.random.choice(NAMES), self._keys()
        change(folder / name, keys)
        return f"{name} {keys}"

    def _spoil(self, folder):
        path = folder / self.random.choice([*NAMES[:1], "tokenizer.json", "generation_config.json"])
        tree = read(path)
        done = spoil(tree, self.random)
        path.write_bytes(json.dumps(tree).encode("utf-8", "surrogatepass"))
        return f"{path.name} {done}"

    def _index(self, folder):
        path = self.random.choice([self._path(), f"{self._path()}.safetensors"])
        write(folder / "model.safetensors.index.json", {"weight_map": {"transformer.wte.weight": path}})
        if gone := self.random.random() < 0.5:
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        return f"{path} {gone}"

    def _metadata(self, folder):
        metadata = self.random.choice([{"format": "evil"}, {"auto_map": self._target()}, {"../x": "../x"}])
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata)
        return metadata

    def _files(self, folder):
        for name in ("adapter_config.json", "preprocessor_config.json", "processor_config.json", "modules.json"):
            write(folder / name, self._keys() | {"base_model_name_or_path": str(folder), "peft_type": "LORA"})
        for name in (
            "custom_generate/generate.py",
            "custom_generate/requirements.txt",
            "__init__.py",
            "evil/__init__.py",
        ):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code_of(self.root))
        return "added"

    def _template(self, folder):
        text = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '/etc/passwd' %}"
        (folder / "chat_template.jinja").write_text(text)
        write(folder / "added_tokens.json", {self._path(): self.random.choice(ODD)})
        return text

    def _text_name(self, run):
        record, name = read(run / "published.json"), self._path()
        record["texts"][name] = self.random.choice([code_of(self.root), "{}", record["texts"]["config.json"]])
        write(run / "published.json", record)
        return name

    def _text(self, run):
        record, name, keys = read(run / "published.json"), self.random.choice((NAMES[0], NAMES[3])), self._keys()
        if self.random.random() < 0.2:
            keys = {
                self.random.choice(("n_layer", "n_embd", "vocab_size", "n_positions")): self.random.choice(
                    (0, 3, 10**9)
                )
            }
        record["texts"][name] = json.dumps(json.loads(record["texts"].get(name, "{}")) | keys)
        if self.random.random() < 0.5:
            record["texts"]["evil.py"] = code_of(self.root)
        write(run / "published.json", record)
        return f"{name} {keys}"

    def _tensor(self, run):
        record, path = read(run / "published.json"), f"{self._path()}{self.random.choice(('', '.safetensors'))}"
        for name in list(record["tensors"])[: self.random.choice((1, 99))]:
            record["tensors"][name][0] = path
        record["metadata"][path] = {"format": "pt"}
        write(run / "published.json", record)
        return path

    def _file_name(self, run):
        record, name = read(run / "tokenizer.json"), self._path()
        content = self.random.choice([code_of(self.root), "RVZJTA==", "{}"])
        record["files"] = {name: content} | record["files"] if self.random.random() < 0.8 else {name: content}
        self._write_tokenizer(run, record)
        return name

    def _file(self, run):
        record, name, keys = read(run / "tokenizer.json"), self.random.choice(NAMES), self._keys()
        record["files"][name] = json.dumps(json.loads(record["files"].get(name, "{}")) | keys)
        self._write_tokenizer(run, record)
        return f"{name} {keys}"

    def _write_tokenizer(self, run, record):
        (run / "tokenizer.json").write_text(json.dumps({"published": record["published"], **record}), "utf-8")

    def _plugins(self, run):
        change(run / "model.json", {"plugins": ["evil"]})
        return "evil"

    def _yaml(self, run):
        text = (run / "config.yaml").read_text()
        head = f"evil: !!python/object/apply:os.system ['touch {self.root / 'harmed'}']\n"
        (run / "config.yaml").write_text(head + text)
        return head

    def _spoil_run(self, run):
        path = run / self.random.choice(("published.json", "tokenizer.json", "model.json", "status.json"))
        tree = read(path)
        done = spoil(tree, self.random)
        path.write_bytes(json.dumps(tree).encode("utf-8", "surrogatepass"))
        return f"{path.name} {done}"


def load(folder):
    """Load an exported folder as a person does who trusts its code."""
    import transformers

    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        try:
            getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
        except Exception as error:
            if "Evil" in repr(error):
                raise


class Fuzz:
    """Try one folder at a time in `root`."""

    def __init__(self, root, random, onnx):
        self.root, self.random, self.hook = root.resolve(), random, Hook(root.resolve())
        os.environ |= {"HF_HOME": str(self.root / "hf"), "HF_HUB_OFFLINE": "1"}
        self.report = {"folders": 0, "commands": {}, "faults": []}
        (self.root / "tmp").mkdir()
        tempfile.tempdir = str(self.root / "tmp")
        publish("gpt2", self.root / "sound" / "theirs")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            write(self.root / "sound" / "theirs" / name, {"eos_token": "w36"})
        run_command(["import", str(self.root / "sound" / "theirs"), "-o", str(self.root / "sound" / "run")])
        self.once("folder", lambda folder: "", onnx)  # imports all libraries
        assert set(self.report["commands"].values()) == {1}, self.report
        self.report["faults"].clear()
        (self.root / "harmed").unlink(missing_ok=True)

    def once(self, kind, attack, onnx):
        """Copy a sound folder, change it, and run every command in it."""
        case = self.root / "case"
        shutil.copytree(self.root / "sound" / ("theirs" if kind == "folder" else "run"), case / "theirs")
        self.what = f"{kind}: {attack(case / 'theirs')}"
        self.report["folders"] += 1
        os.chdir(self.random.choice((case, case / "theirs")))  # `theirs--evil.Evil` is a folder of the first
        try:
            run = case / "theirs"
            if kind == "folder":
                run = case / "run"
                self.command("import", str(case / "theirs"), "-o", str(run))
            if run.is_dir():
                for to in ("huggingface", "ctranslate2", *["onnx"] * onnx):
                    if self.command("export", str(run), "--to", to, "-o", str(case / to)) and to == "huggingface":
                        self.guard("load", [case / to], lambda: load(case / "huggingface"))
                self.command("eject", str(run), "-o", str(case / "model.py"))
                self.command("figure", str(run), "-o", str(case / "model.svg"))
                self.command("report", str(run.parent), "-o", str(case / "report.html"))
        finally:
            os.chdir(self.root)
            shutil.rmtree(case)

    def command(self, *arguments):
        """Run a command; return True if it succeeded. What failed leaves no output."""
        output = Path(arguments[-1])
        done = self.guard(arguments[0], [output], lambda: run_command(list(arguments)))
        succeeded = done is not None and not done[-1]
        if done is not None and not succeeded and output.exists():
            self.fault(arguments[0], f"failed and left {sorted(path.name for path in output.rglob('*'))}")
        name = " ".join(word for word in arguments if os.sep not in word)
        self.report["commands"][name] = self.report["commands"].get(name, 0) + succeeded
        return succeeded

    def guard(self, name, outputs, action):
        """Return the result of an action that may write only to `outputs`, or None after a traceback."""
        before = self.tree(outputs)
        self.hook.outputs = [os.path.realpath(path) for path in (*outputs, self.root / "tmp", self.root / "hf")]
        self.hook.outputs += [f"{path}.part" for path in self.hook.outputs]
        self.hook.on = True
        try:
            return action()
        except Exception as error:
            self.fault(name, "".join(traceback.format_exception(error))[-1500:])
            return None
        finally:
            self.hook.on = False
            for event in self.hook.events:
                self.fault(name, event)
            self.hook.events.clear()
            if changed := self.tree(outputs) ^ before:
                self.fault(name, f"changed {sorted(changed)[:5]}")

    def fault(self, name, text):
        self.report["faults"].append(f"{self.what}\n{name}: {text}")

    def tree(self, outputs):
        """Return the files of the sandbox outside `outputs`, with their times, to notice writes without an event."""
        skipped = {str(path) for path in (*outputs, self.root / "tmp", self.root / "hf", self.root / "sound")}
        files = set()
        for folder, names, content in os.walk(self.root):
            names[:] = [name for name in names if f"{folder}/{name}" not in skipped]
            files |= {
                (path, os.lstat(path).st_mtime_ns) for name in content if (path := f"{folder}/{name}") not in skipped
            }
        return files


def fuzz(root, count, seed):
    """Try `count` folders; one in a hundred is also exported to ONNX, which takes seconds."""
    random = Random(seed)
    fuzzer, attack = Fuzz(root, random, onnx=count >= 100), Attack(root.resolve(), random)
    for number in range(count):
        kind, change = ("folder", attack.on_folder) if number % 2 else ("run", attack.on_run)
        fuzzer.once(kind, change, onnx=number % 100 == 99)
    return fuzzer.report


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
