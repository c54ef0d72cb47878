"""SEC2: what a stranger may write into a configuration that others load."""

import copy
from collections.abc import Callable
from typing import Any

import yaml

Config = dict[str, Any]
Edit = Callable[[Config], Any]  # changes the configuration, or returns the text of another one
EVIL = "evil_module"  # lies where Python finds it, and leaves a mark when it is imported


def write(edit: Edit, config: Config) -> str:
    """Return the text of the changed configuration."""
    changed = copy.deepcopy(config)
    text = edit(changed)
    return text if isinstance(text, str) else yaml.safe_dump(changed, sort_keys=False)


def put(key: str, value: Any) -> Edit:
    """Set a dotted key."""

    def edit(config: Config) -> None:
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    return edit


def node(target: Any, /, **arguments: Any) -> Config:
    return {"_target_": target, **arguments}


def network(target: Any, /, **arguments: Any) -> Edit:
    return put("components.q_network", node(target, **arguments))


def both(*edits: Edit) -> Edit:
    """Several changes."""

    def edit(config: Config) -> None:
        for change in edits:
            change(config)

    return edit


TOUCH = "touch MARK"
TARGETS: dict[str, Config] = {
    # The standard library.
    "os.system": {"command": TOUCH},
    "os.popen": {"cmd": TOUCH},
    "os.execv": {"path": "/bin/touch", "argv": ["touch", "MARK"]},
    "os.remove": {"path": "victim/diary.txt"},
    "posix.system": {"command": TOUCH},
    "subprocess.run": {"args": ["touch", "MARK"]},
    "subprocess.Popen": {"args": TOUCH, "shell": True},
    "subprocess.check_output": {"args": ["touch", "MARK"]},
    "builtins.eval": {"source": f"__import__('os').system('{TOUCH}')"},
    "builtins.exec": {"source": f"__import__('os').system('{TOUCH}')"},
    "builtins.__import__": {"name": EVIL},
    "builtins.open": {"file": "MARK", "mode": "w"},
    "builtins.getattr": {},
    "eval": {"source": "1"},
    "importlib.import_module": {"name": EVIL},
    "importlib.__import__": {"name": EVIL},
    "pydoc.locate": {"path": f"{EVIL}.Evil"},
    "pydoc.pipepager": {"text": "", "cmd": TOUCH},
    "functools.partial": {"func": "os.system"},
    "functools.reduce": {},
    "operator.methodcaller": {"name": "system"},
    "operator.attrgetter": {"attr": "system"},
    "runpy.run_path": {"path_name": f"{EVIL}.py"},
    "runpy.run_module": {"mod_name": EVIL},
    "timeit.timeit": {"stmt": f"__import__('{EVIL}')"},
    "cProfile.run": {"statement": f"import {EVIL}"},
    "code.interact": {},
    "ctypes.CDLL": {"name": "libc.so.6"},
    "pickle.loads": {"data": ""},
    "marshal.loads": {},
    "pathlib.Path": {},
    "pathlib.Path.write_text": {"self": "MARK", "data": "x"},
    "shutil.rmtree": {"path": "victim"},
    "urllib.request.urlopen": {"url": "http://127.0.0.1:9/"},
    "socket.create_connection": {"address": ["127.0.0.1", 9]},
    "webbrowser.open": {"url": "http://127.0.0.1:9/"},
    "logging.config.dictConfig": {"config": {"version": 1}},
    "logging.FileHandler": {"filename": "MARK"},
    "logging.os.system": {"command": TOUCH},
    "multiprocessing.Process": {"target": "os.system"},
    "tempfile.mkdtemp": {},
    "types.FunctionType": {},
    # Other packages.
    "torch.load": {"f": "MARK", "weights_only": False},
    "torch.save": {"obj": 1, "f": "MARK"},
    "torch.hub.load": {"repo_or_dir": ".", "model": "x", "source": "local"},
    "torch.jit.load": {"f": "x"},
    "torch.package.PackageImporter": {"file_or_buffer": "x"},
    "torch.utils.cpp_extension.load": {"name": "x", "sources": []},
    "torch.utils.model_zoo.load_url": {"url": "x"},
    "torch.ops.load_library": {"path": "x"},
    "torch.multiprocessing.spawn": {"fn": "x"},
    "torch.compile": {},
    "torch.Tensor": {},
    "numpy.load": {"file": "x", "allow_pickle": True},
    "numpy.fromfile": {"file": "victim/diary.txt"},
    "numpy.memmap": {"filename": "MARK", "mode": "w+", "shape": [1]},
    "numpy.ctypeslib.load_library": {"libname": "x", "loader_path": "."},
    "yaml.unsafe_load": {"stream": "!!python/object/apply:os.system ['touch MARK']"},
    "hydra.utils.instantiate": {"config": {"_target_": "os.system", "command": TOUCH}},
    "omegaconf.OmegaConf.load": {"file_": "victim/diary.txt"},
    "safetensors.torch.load_file": {"filename": "x"},
    "gymnasium.make": {"id": f"{EVIL}:Env-v0"},
    f"{EVIL}.Evil": {},
    EVIL: {},
    # Ours that are no parts.
    "rl_lab.cli.main": {"argv": ["demo"]},
    "rl_lab.train": {"name": "ppo_cartpole"},
    "rl_lab.runs.train": {"name": "ppo_cartpole", "run_dir": "MARK"},
    "rl_lab.policies.export_policy": {"folder": ".", "out": "MARK"},
    "rl_lab.orchestration.files.Files": {},
    "rl_lab.orchestration.checkpoint.CheckpointManager": {"folder": "."},
    "rl_lab.orchestration.loggers.JsonlLogger": {"path": "MARK"},
    "rl_lab.instantiate.instantiate": {"node": {}, "allow": ["os"]},
    "rl_lab.targets.resolve_target": {"node": {}, "allow": ["os"]},
    "rl_lab.envs.make.make_env": {"id": f"{EVIL}:Env-v0", "num_envs": 1, "allow": [EVIL]},
    "rl_lab.cli.doctor.attempt": {"program": f"import {EVIL}", "timeout": 5},
    "rl_lab.core.seeding.seed_all": {"seed": 0},
    "rl_lab.components_of_others.Thing": {},
    # Aliases: allowed paths that lead elsewhere.
    "torch.nn.functional.torch.load": {"f": "x"},
    "torch.nn.functional.importlib.import_module": {"name": EVIL},
    "torch.nn.modules.module.functools.partial": {"func": "x"},
    "torch.nn.modules.module.torch.hub.load": {},
    "torch.nn.init.torch.load": {"f": "x"},
    "torch.nn.functional.np": {},
    "torch.optim.optimizer.functools.wraps": {},
    "torch.optim.lr_scheduler.types.FunctionType": {},
    "rl_lab.components.nets.np.load": {"file": "x", "allow_pickle": True},
    "rl_lab.components.nets.np": {},
    "rl_lab.components.nets.torch.load": {"f": "x"},
    "rl_lab.components.nets.itertools.chain": {},
    "rl_lab.data.sources.torch.load": {"f": "x"},
    "rl_lab.data.sources.np.load": {"file": "x"},
    "rl_lab.data.replay.partial": {"func": "x"},
    "rl_lab.data.replay.itemgetter": {},
    "rl_lab.data.collector.Callable": {},
    "rl_lab.workflows.dqn.copy.deepcopy": {"x": 1},
    "rl_lab.workflows.dqn.dataclass": {},
    "rl_lab.core.schedules.math.sin": {},
    # Private parts of ours and of torch, and public ones of torch that are no modules.
    "rl_lab.data.sources._storage_device": {"storage": "x", "device": "y"},
    "rl_lab.data.storage._checked": {"name": "x", "values": 1, "column": 1},
    "torch.nn.attention._fa4.register_flash_attention_fa4": {"module_path": EVIL},
    "torch.nn.attention._fa4._fa4_import_module": {"module_path": EVIL},
    "torch.nn.attention._fa3.register_flash_attention_fa3": {"module_path": EVIL},
    "torch.nn.attention._fa3._fa3_import_module": {"module_path": EVIL},
    "torch.nn.attention.register_flash_attention_impl": {"impl": "x", "register_fn": "y"},
    "torch.nn.attention.activate_flash_attention_impl": {"impl": "FA4"},
    "torch.nn.attention.flex_attention.flex_attention": {},
    "torch.nn.utils._deprecation_utils.lazy_deprecated_import": {"all": [], "old_module": "x", "new_module": EVIL},
    "torch.nn.utils.stateless.functional_call": {},
    "torch.nn.utils.prune.random_unstructured": {},
    "torch.nn.utils.parametrize.register_parametrization": {},
    "torch.nn.modules.module.register_module_forward_hook": {"hook": node("torch.nn.ReLU")},
    "torch.nn.modules.module.register_module_full_backward_hook": {"hook": node("torch.nn.ReLU")},
    "torch.nn.modules.lazy.LazyModuleMixin": {},
    "torch.nn.parallel.data_parallel": {},
    "torch.nn.parallel.DistributedDataParallel": {"module": node("torch.nn.ReLU")},
    "torch.nn.init.normal_": {},
    "torch.nn.cpp.ModuleWrapper": {"cpp_module": 1},
    "torch.nn.quantized.Linear": {"in_features": 1, "out_features": 1},
    "torch.nn.Parameter": {},
    "torch.nn.factory_kwargs": {"kwargs": {}},
    "torch.optim.lr_scheduler.LambdaLR": {"optimizer": 1, "lr_lambda": 1},
    "torch.optim.swa_utils.update_bn": {},
    "torch.optim._multi_tensor.Adam": {},
    # Names that are none.
    "": {},
    ".": {},
    "torch": {},
    "torch.nn": {},
    "torch.nn..Linear": {},
    ".torch.nn.Linear": {},
    "torch.nn.Linear.__init__": {},
    "torch.nn.Linear.__class__": {},
    "torch.nn.__loader__": {},
    "torch.nn.__builtins__": {},
    "torch.nn.functional.__builtins__.eval": {},
    "rl_lab.components.__spec__.loader": {},
    "rl_lab.components.nets.MLP.__init__.__globals__": {},
    "rl_lab.components.nets.MLP.load_state_dict": {},
    " torch.nn.Linear": {},
    "torch/nn/Linear": {},
    f"../{EVIL}.Evil": {},
    "torch\uff0enn\uff0eLinear": {},
    "x" * 10_000: {},
    "rl_lab.components." + "x." * 2_000 + "y": {},
}

# Names that an allowed module does not have: the answer lists those that it has.
ABSENT = ("torch.nn.Linear;import os", "torch.nn.\x1b[2J", "torch.optim.Adam()", "torch.nn.functional.")

# Where a target may be hidden.
SYSTEM = node("os.system", command=TOUCH)
PARTIAL = node("os.system", _partial_=True, command=TOUCH)
PLACES: dict[str, Edit] = {
    "an argument": put("components.q_network.hidden", SYSTEM),
    "a list": put("components.q_network.hidden", [SYSTEM]),
    "a list in a list": put("components.q_network.hidden", [[[PARTIAL]]]),
    "a mapping in an argument": put("workflow.gamma", {"a": {"b": SYSTEM}}),
    "a part of a part": network("torch.nn.DataParallel", module=SYSTEM),
    "an argument that takes anything": network("torch.nn.Identity", anything=SYSTEM),
    "a partial": put("components.q_network", PARTIAL),
    "the workflow": put("workflow", SYSTEM),
    "an argument of the workflow": put("workflow.epsilon", SYSTEM),
    "an optimiser": put("optimizers.agent.optimizer", PARTIAL),
    "an argument of an optimiser": put("optimizers.agent.optimizer.lr", SYSTEM),
    "a learning rate": put("optimizers.agent.learning_rate", SYSTEM),
    "a bare optimiser": put("optimizers", {"world_model": PARTIAL}),
    "a controller": put("controllers.actor", SYSTEM),
    "a target that is a list": network(["os.system"]),
    "a target that is a mapping": network({"_target_": "os.system"}),
    "a target that is a number": network(3),
    "a target that is nothing": network(None),
    "a target behind a reference": both(
        put("algorithm.evil", "os.system"), put("components.q_network._target_", "${algorithm.evil}")
    ),
    "a node behind a reference": both(put("algorithm.evil", SYSTEM), put("components.q_network", "${algorithm.evil}")),
    "the key _args_": put("components.q_network._args_", ["touch", "MARK"]),
    "the key _recursive_": put("components.q_network._recursive_", False),
    "the key _convert_": put("components.q_network._convert_", "all"),
    "the key __class__": put("components.q_network.__class__", "os.system"),
    "the key __init__": put("components.q_network.__init__", "os.system"),
    "the key _partial_": put("components.q_network._partial_", "os.system"),
    "private keys of a part that takes anything": network("torch.nn.Identity", _args_=["x"]),
    "a second target": put("components.q_network._target__", "os.system"),
    "a hook": put("training.phases", [{"name": "a", "duration_steps": 64, "workflow_hooks": [SYSTEM]}]),
    "the name of a hook": put(
        "training.phases", [{"name": "a", "duration_steps": 64, "workflow_hooks": ["__init__", "os.system"]}]
    ),
    "a schedule": put("workflow.epsilon", node("rl_lab.core.schedules.torch.load", f="x")),
}


def environment(name: str, /, **kwargs: Any) -> Edit:
    return put("environment", {"id": name, "kwargs": kwargs})


# Only what building an experiment looks at; an exported agent needs none of it.
EXPERIMENT_PLACES: dict[str, Edit] = {
    "a buffer": put("buffer", SYSTEM),
    "an argument of a buffer": put("buffer.storage", SYSTEM),
    "another buffer": put("buffers.more", SYSTEM),
    "a buffer that climbs out": put("buffers", {"../../victim": node("rl_lab.data.sources.StreamSource")}),
    "a buffer that is elsewhere": put("buffers", {"/etc": node("rl_lab.data.sources.StreamSource")}),
    "environment: a module": put("environment.id", f"{EVIL}:Env-v0"),
    "environment: a module of the library": put("environment.id", "os:system"),
    "environment: a module in a package": put("environment.id", f"{EVIL}.sub:Env-v0"),
    "environment: a module without a name": put("environment.id", ":CartPole-v1"),
    "environment: a module before a good name": put("environment.id", f"{EVIL}:CartPole-v1"),
    "environment: a module behind a good name": put("environment.id", f"CartPole-v1:{EVIL}"),
    "environment: another library": put(
        "environment", {"id": "GymV26Environment-v0", "kwargs": {"env_id": f"{EVIL}:E"}}
    ),
    "environment: an older library": put(
        "environment", {"id": "GymV21Environment-v0", "kwargs": {"env_id": f"{EVIL}:E"}}
    ),
    "environment: a path": put("environment.id", f"tiny/../../{EVIL}"),
    "environment: a list": put("environment.id", [EVIL]),
    "environment: a node": put("environment.id", SYSTEM),
    "environment: moves the cursor": put("environment.id", "\x1b]0;x\x07\x1b[2J"),
    "environment: an object": put("environment.kwargs", {"length": SYSTEM}),
    "environment: settings that are a node": put("environment.kwargs", SYSTEM),
    "environment: an object for Gymnasium": put(
        "environment", {"id": "CartPole-v1", "kwargs": {"sutton": SYSTEM, "x": SYSTEM}}
    ),
    "environment: another id": put("environment", {"id": "CartPole-v1", "kwargs": {"id": f"{EVIL}:Env-v0"}}),
    "environment: an entry point": put("environment", {"id": "CartPole-v1", "kwargs": {"entry_point": f"{EVIL}:Env"}}),
    "environment: private settings": put("environment", {"id": "CartPole-v1", "kwargs": {"__class__": EVIL}}),
    "environment: a million billion of them": put("environment.num_envs", 10**15),
}

# What the schema refuses.
SCHEMA: dict[str, Edit] = {
    "the key __class__ at the root": put("__class__", "os.system"),
    "the key __reduce__ at the root": put("__reduce__", ["os.system", [TOUCH]]),
    "Hydra at the root": put("hydra", {"searchpath": [f"pkg://{EVIL}"]}),
    "defaults at the root": put("defaults", ["/../../victim/diary"]),
    "a target at the root": put("_target_", "os.system"),
    "a target in a section": put("training._target_", "os.system"),
    "a section that is a node": put("evaluation", SYSTEM),
    "a name that climbs out": put("experiment.name", "../../victim"),
    "a name that is elsewhere": put("experiment.name", "/etc/passwd"),
    "a name that moves the cursor": put("experiment.name", "\x1b[2J"),
    "a million threads": put("training.threads", 10**6),
    "a device that is none": put("experiment.device", "cuda:0; touch MARK"),
}


def text(value: str) -> Edit:
    """A text where any text may stand."""
    return put("algorithm.note", value)


ENVIRONMENT = "${oc.env:CANARY}"
RESOLVERS: dict[str, Edit] = {
    **{
        value: text(value)
        for value in (
            ENVIRONMENT,
            "${oc.env:CANARY,nothing}",
            "${oc.env:PATH}",
            "${ oc.env : CANARY }",
            "a ${oc.env:CANARY} b",
            "${add:${oc.env:CANARY}}",
            "${oc.env:${algorithm.n_step}}",
            "${oc.decode:'{a: 1}'}",
            "${oc.create:{a: 1}}",
            "${oc.select:algorithm}",
            "${oc.deprecated:algorithm}",
            "${oc.dict.keys:algorithm}",
            "${oc.dict.values:algorithm}",
            "${hydra:runtime.cwd}",
            "${now:%Y}",
            "${python_version:}",
            "${evil:touch MARK}",
            "${eval:1}",
            "${:x}",
            "\\\\${oc.env:CANARY}",
        )
    },
    "a resolver whose name is put together": both(put("algorithm.half", "env"), text("${oc.${algorithm.half}:CANARY}")),
    "a resolver behind a reference": both(put("algorithm.whole", "oc.env"), text("${${algorithm.whole}:CANARY}")),
    "a key that is put together": text("${algorithm.${algorithm.n_step}}"),
    "a resolver in a name": put("experiment.name", ENVIRONMENT),
    "a resolver in a list": put("components.q_network.hidden", [ENVIRONMENT]),
}


def with_line(line: str) -> Edit:
    """A line before everything else."""
    return lambda config: line + "\n" + yaml.safe_dump(config, sort_keys=False)


def instead(value: str) -> Edit:
    return lambda config: value


LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
DOUBLING = "".join(f"  a{i}: '${{algorithm.a{i - 1}}}${{algorithm.a{i - 1}}}'\n" for i in range(1, 40))
BRANCHING = "".join(f"  a{i}: {{x: '${{algorithm.a{i - 1}}}', y: '${{algorithm.a{i - 1}}}'}}\n" for i in range(1, 30))
YAML: dict[str, Edit] = {
    **{
        tag: with_line(f"evil: {tag}")
        for tag in (
            "!!python/object/apply:os.system ['touch MARK']",
            "!!python/object/new:os.system ['touch MARK']",
            "!!python/object:evil_module.Evil {}",
            "!!python/name:os.system ''",
            "!!python/module:evil_module ''",
            "!!python/tuple [1]",
            "!!python/object/apply:pathlib.PosixPath ['MARK']",
            "!evil {}",
            "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch MARK']",
            "!!binary TUFSSw==",
            "!!set {a, b}",
        )
    },
    "a tag with another name": instead(
        "%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.system ['touch MARK']\n"
    ),
    "an alias": with_line("a: &a [1]\nb: *a"),
    "a billion laughs": with_line("a0: &a0 [lol]\n" + LAUGHS),
    "references that double": instead("algorithm:\n  a0: lol\n" + DOUBLING),
    "references that branch": instead("algorithm:\n  a0: {x: 1}\n" + BRANCHING),
    "references in a circle": with_line("a: ${b}\nb: ${a}"),
    "a reference to its parent": with_line("a: {b: '${a}'}"),
    "a reference to nothing": with_line("a: ${nothing.at.all}"),
    "20,000 sums": with_line("a: '" + "${add:1,1}" * 20_000 + "'"),
    "sums in sums": with_line("a: '" + "${add:" * 3_000 + "1" + "}" * 3_000 + "'"),
    "100,000 lists": instead("[" * 100_000),
    "100,000 mappings": instead("{a: " * 100_000),
    "100,000 numbers": with_line("a: [" + "1," * 100_000 + "1]"),
    "a megabyte": with_line("# " + "x" * 2**20),
    "a number of 5,000 digits": with_line("a: " + "9" * 5_000),
    "a number of 5,000 hexadecimal digits": with_line("a: 0x" + "f" * 5_000),
    "a number to the base of 60": with_line("a: " + ":".join(["1"] * 5_000)),
    "a key twice": with_line("experiment: {}"),
    "two documents": with_line("a: 1\n---"),
    "a zero": with_line("a: \0"),
    "nothing": instead(""),
    "a text": instead("os.system"),
    "a list": instead("- a\n- b\n"),
    "a key that is a list": with_line("? [a]\n: b"),
    "a key that is nothing": with_line("~: b"),
    "half of a mapping": instead("{a: b"),
}

# What the search for configuration files does not follow.
ROOT = "defaults: [_self_, {experiment: null}]\n"
SEARCH: dict[str, tuple[str, str]] = {  # name: (file below configs/, its text)
    "a search path that imports": ("config.yaml", ROOT + f"hydra: {{searchpath: ['pkg://{EVIL}']}}\n"),
    "a search path that leaves": ("config.yaml", ROOT + "hydra: {searchpath: ['file://../victim']}\n"),
    "a search path of an experiment": ("experiment/x.yaml", f"hydra: {{searchpath: ['pkg://{EVIL}']}}\n"),
    "defaults above": ("experiment/x.yaml", "defaults: ['/../victim/other@_global_', _self_]\n"),
    "defaults beside": ("experiment/x.yaml", "defaults: ['../../victim/other@_global_', _self_]\n"),
    "defaults of a group above": ("experiment/x.yaml", "defaults: [{'/../victim@_global_': other}, _self_]\n"),
    "defaults elsewhere": ("experiment/x.yaml", "defaults: ['//etc/hostname', _self_]\n"),
    "a launcher": ("experiment/x.yaml", "defaults: [{'override /hydra/launcher': evil}, _self_]\n"),
    "a resolver that is none": ("experiment/x.yaml", "algorithm: {a: '${evil:1}'}\n"),
}
HARMLESS_SEARCH: dict[str, str] = {
    "callbacks": f"hydra: {{callbacks: {{a: {{_target_: {EVIL}.Evil}}}}}}\n",
    "variables": "hydra: {job: {env_set: {PATH: evil}}}\n",
    "logging": f"hydra: {{job_logging: {{handlers: {{a: {{class: {EVIL}.Evil}}}}}}}}\n",
}

# Odd and harmless: free-form data that nobody builds.
HARMLESS: dict[str, Edit] = {
    "a target in free-form data": put("algorithm.evil", SYSTEM),
    "a target in free-form lists": put("algorithm.evil", [[PARTIAL]]),
    "private keys in free-form data": put("algorithm.__class__", "os.system"),
    "a run to continue": put("training.resume_path", "/etc"),
    "a folder to write to": put("logging.folder", "/etc"),
}
