"""From a configuration to the objects of a run: environment processes, model, renderer, sampler, learner, methods."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay import tiny
from assay.config import RunConfig, env_settings, environments, task_quotas
from assay.curriculum import Curriculum, Mixture
from assay.envs.inline import AnyPool, open_pool
from assay.envs.registry import ENVIRONMENTS, make
from assay.learner.torch_learner import TorchLearner
from assay.methods.host import CRITICS, Host
from assay.methods.registry import compose
from assay.model import Network, check_exact, load_model, load_tokenizer
from assay.protocols import Method, Reset, Sampling, Setting, UserError, World
from assay.renderers import ChatRenderer
from assay.rollout import Driver, Progress
from assay.rows import Layout
from assay.sampler.torch_sampler import TorchSampler

LORA_TARGETS = "all-linear"
LEARNING_RATE_AT_END = 0.1  # of the peak, for decaying schedules


@dataclass(slots=True)
class Bench:
    """Everything that a run needs, built once. `close` ends the worker processes. Pools and renderers are by environment,
    in the order named; `pool` and `renderer` are those of the first."""

    config: RunConfig
    pools: dict[str, AnyPool]
    tokenizer: Any
    renderers: dict[str, ChatRenderer]
    network: Network
    sampler: TorchSampler
    layout: Layout

    @property
    def pool(self) -> AnyPool:
        return next(iter(self.pools.values()))

    @property
    def renderer(self) -> ChatRenderer:
        return next(iter(self.renderers.values()))

    @property
    def environments(self) -> list[str]:
        return list(self.pools)

    @property
    def mixture(self) -> list[str]:
        """The environments where there are several, else none: what facts and panels are split by."""
        return self.environments if len(self.pools) > 1 else []

    def driver(
        self,
        temperature: float,
        seed: int,
        wrappers: Sequence[Callable[..., Any]] = (),
        progress: Callable[[Progress], None] | None = None,
    ) -> Driver:
        """Episodes at a temperature (0: greedy)."""
        config = self.config
        return Driver(
            self.sampler,
            self.pool,
            self.renderer,
            Sampling(temperature, config.max_turn_tokens, self.renderer.stop_ids),
            seed=seed,
            layout=self.layout,
            max_episode_tokens=config.max_episode_tokens,
            concurrency=config.runtime.concurrency,
            delay=config.runtime.delay_ticks,
            wrappers=wrappers,
            progress=progress,
            others=[(self.pools[name], self.renderers[name]) for name in self.environments[1:]],
        )

    @property
    def setting(self) -> Setting:
        """What methods are told of the run."""
        config = self.config
        worlds = {n: World(n, tuple(p.spec["skills"]), self.renderers[n]) for n, p in self.pools.items()}
        return Setting(
            worlds,
            self.layout,
            config.updates_per_batch * config.epochs,
            min(self.network.max_length, config.max_episode_tokens),
            config.seed,
        )

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def build(config: RunConfig) -> Bench:
    """Starts the workers of every environment and loads the model; UserError for what cannot be."""
    torch.set_num_threads(config.runtime.threads)
    try:
        layout = Layout.parse(config.layout)
    except ValueError as error:
        raise UserError(str(error)) from error
    runtime, pools, renderers = config.runtime, dict[str, AnyPool](), dict[str, ChatRenderer]()
    try:
        for name in environments(config):
            settings = env_settings(config, name)
            pools[name] = open_pool(name, settings, runtime.workers, runtime.step_timeout_s)
            if "prepare" in pools[name].spec["powers"] and name in ENVIRONMENTS:
                _prepare_tasks(config, pools[name])
        network, tokenizer = load_policy(config)
        length = min(network.max_length, config.max_episode_tokens)
        for name, pool in pools.items():
            renderers[name] = renderer_of(config, tokenizer, pool.spec)
            if layout.name == "window" and not renderers[name].windows:
                raise UserError(
                    f"layout {config.layout!r} needs a chat template with a system message: use layout append"
                )
            _check_fit(config, pool, renderers[name], length)
        decode = next(iter(renderers.values())).decode
        sampler = TorchSampler(network, 2 * runtime.concurrency, length, decode)
    except BaseException:
        for pool in pools.values():
            pool.close()
        raise
    return Bench(config, pools, tokenizer, renderers, network, sampler, layout)


def _prepare_tasks(config: RunConfig, pool: AnyPool) -> None:
    """Makes, with progress shown, the tasks that this run will play and that cost seconds each to make (TextWorld's games).
    What is made is kept; a run too short to see the whole training split makes its tasks as it meets them."""
    episodes, panel = config.steps * task_quotas(config)[pool.name], config.evaluation.tasks
    wanted = {"train": episodes, "iid": panel, "ood": panel if config.evaluation.ood else 0}
    settings = env_settings(config, pool.name)
    env: Any = make(pool.name, **settings)
    for split, count in wanted.items():
        size = pool.spec["sizes"][split]
        if count and (split != "train" or count >= size):
            env.prepare(split, min(count, size), os.cpu_count() or 1, **settings)
    env.close()


def _check_fit(config: RunConfig, pool: AnyPool, renderer: ChatRenderer, length: int) -> None:
    """UserError when the first training task leaves no room for an answer: every episode would be cut at once."""
    (task,) = _curriculum(config, pool).tasks(1, 1)
    pool.submit(0, Reset("train", task))
    (start,) = pool.collect([0])
    if start.error:
        return  # an environment error: counted when it happens in the run
    prompt = len(renderer.prompt(str(start.info.get("goal", "")))[0])
    seen = len(renderer.observation(start.observation, first=True)[0])
    if prompt + seen >= length:
        raise UserError(
            f"the prompt ({prompt} tokens) and first observation ({seen}) of {pool.name} leave no room in a context of "
            f"{length}: raise max_episode_tokens if the model allows it, or use --prompt brief or a longer-context model"
        )


def load_policy(config: RunConfig, path: str | Path | None = None) -> tuple[Network, Any]:
    """(network, tokenizer) of `path`, or of the configuration's model; with an adapter if it asks for one."""
    source = str(path or policy_folder(config.model))
    tokenizer = load_tokenizer(source)
    model = load_model(source, getattr(torch, config.runtime.dtype))
    model.to(_device(config.runtime.device))
    if config.lora_rank:
        model = _with_adapter(model, config)
    network = Network(model)
    check_exact(network)
    return network, tokenizer


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # an AssertionError: torch without that device
        raise UserError(f"runtime.device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def policy_folder(name: str) -> str:
    """Of a built-in policy, of a run directory's trained policy, or the name itself (a folder, a hub name)."""
    built_in = tiny.folder_of(name)
    if built_in is not None:
        return str(built_in)
    if (Path(name) / "policy").is_dir():
        return str(Path(name) / "policy")
    if os.sep not in name and "/" not in name:
        near = difflib.get_close_matches(name, tiny.SHAPES, 1, 0.5)
        if near:
            raise UserError(f"model {name!r} does not exist: did you mean {near[0]!r}?")
    return name


def needs_reference(config: RunConfig) -> bool:
    """Does the KL need a second model? An adapter's reference is the model without it."""
    return config.slots.kl != "none" and config.slots.kl_coefficient > 0 and not config.lora_rank


def build_learner(config: RunConfig, network: Network, failures: Path | None) -> TorchLearner:
    """The learner of the RL phase: a fresh optimiser; a frozen copy as reference where the KL needs one."""
    reference = Network(copy.deepcopy(network.model)) if needs_reference(config) else None
    return TorchLearner(
        network,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
        tokens_per_forward=config.runtime.tokens_per_forward,
        value_head=config.slots.advantage in CRITICS,
        on_nonfinite=config.runtime.on_nonfinite,
        failure_folder=failures,
        reference=reference,
    )


def build_methods(config: RunConfig) -> list[Method]:
    """The host, then the further methods in the order named. One that sets the estimator replaces the host's; UserError
    for what does not exist, and for two that do."""
    host = Host(config.slots, config.max_episode_tokens)
    methods = compose(config.method[1:], config.method_args)
    if any(method.advantage is not None for method in methods):
        host.advantage = None  # type: ignore[assignment,method-assign]
    return [host, *methods]


def build_curriculum(config: RunConfig, pools: Mapping[str, AnyPool]) -> Mixture:
    return Mixture({name: _curriculum(config, pool) for name, pool in pools.items()})


def _curriculum(config: RunConfig, pool: AnyPool) -> Curriculum:
    quotas, size = task_quotas(config), pool.spec["sizes"]["train"]
    if len(quotas) > 1 and size is not None and quotas[pool.name] > size:
        raise UserError(
            f"tasks_per_step gives {pool.name} {quotas[pool.name]} tasks a step, but its split has {size}: lower "
            "tasks_per_step or its share (env_shares)"
        )
    return Curriculum(config.seed, size, quotas[pool.name], pool.name)


def renderer_of(config: RunConfig, tokenizer: Any, spec: Mapping[str, Any]) -> ChatRenderer:
    """With the full or brief instructions of an environment whose process says `spec` of itself."""
    built_in = tokenizer.init_kwargs.get("assay_prompt") == "brief"
    brief = config.prompt == "brief" or (config.prompt == "auto" and built_in)
    return ChatRenderer(tokenizer, str(spec["brief" if brief else "instructions"]), thinking=config.thinking)


def _with_adapter(model: Any, config: RunConfig) -> Any:
    """A fresh adapter around the model, or the one that it has already."""
    if hasattr(model, "peft_config"):
        rank = model.peft_config[model.active_adapter].r
        if rank != config.lora_rank:
            raise UserError(f"model {config.model!r} is an adapter of rank {rank}, and lora_rank is {config.lora_rank}")
        return model
    try:
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise UserError("lora_rank needs peft: pip install 'assay[lora]'") from error
    settings = LoraConfig(
        r=config.lora_rank or 0,
        lora_alpha=config.lora_alpha,
        target_modules=LORA_TARGETS,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's transposed weights
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return get_peft_model(model, settings).eval()
