"""Prints a plan for people: short aligned lines, figures with their unit, approximate ones marked."""

from __future__ import annotations

from rwkv_spec.spec.plan import ModelSizes, Plan, World
from rwkv_spec.spec.types import Spec

_GROUPS = {
    "decay": "large matrices, with weight decay",
    "plain": "without weight decay",
    "double": "without weight decay, twice the lr",
    "untrained": "kept, never trained",
}


def describe(plan: Plan, spec: Spec, *, sizes: ModelSizes, world: World) -> str:
    """The whole plan as text, without a final line end."""
    rows = [
        *_model(sizes, spec),
        *_data(plan, spec),
        *_length(plan, spec),
        *_step(plan, spec, world),
        *_memory(plan),
        *_writes(plan, spec),
        *(("note", note) for note in plan.notes),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in [("plan", f"{spec.name}, in {spec.work_dir}"), *rows])


def _model(sizes: ModelSizes, spec: Spec) -> list[tuple[str, str]]:
    origin = f", from {spec.checkpoint.path}" if spec.checkpoint is not None else ""
    shape = f"{sizes.type}, {counted(sizes.n_layer, 'layer')}, {sizes.n_embd} wide, heads of {sizes.head_size}"
    shape += f", {sizes.vocab_size:,} ids"
    rows = [("model", shape + origin), *_vocabulary(sizes), ("parameters", f"{sizes.num_parameters:,}")]
    for group, count in sizes.parameters_by_group.items():
        if count:
            rows.append((f"  {group}", f"{count:,}  {_GROUPS.get(group, '')}".rstrip()))
    rows.append(("state", f"{sizes.num_state_values:,} values a sequence"))
    return rows


def _vocabulary(sizes: ModelSizes) -> list[tuple[str, str]]:
    """What becomes of a checkpoint's vocabulary rows where the model has another number of them."""
    found, rows = sizes.checkpoint_rows, sizes.vocab_size
    if found is None or found == rows:
        return []
    if rows < found:
        return [("", f"vocabulary: the first {rows:,} of the checkpoint's {found:,} rows kept, {found - rows:,} cut")]
    return [("", f"vocabulary: the checkpoint's {found:,} rows kept, {rows - found:,} made fresh from the seed")]


def _data(plan: Plan, spec: Spec) -> list[tuple[str, str]]:
    about = "≈ " if plan.approximate else ""
    windows = f"{about}{plan.num_windows:,} windows of {spec.train.ctx_len:,}, order {spec.data.order}"
    rows = [
        ("data", f"{about}{plan.num_tokens:,} tokens in {about}{counted(plan.num_documents, 'document')}; {windows}")
    ]
    if plan.num_eval_documents:
        held_out = counted(plan.num_eval_documents, "document")
        rows.append(("held out", f"{about}{plan.num_eval_tokens:,} tokens in {about}{held_out}"))
    else:
        rows.append(("held out", "nothing, so there is no evaluation"))
    return rows


def _length(plan: Plan, spec: Spec) -> list[tuple[str, str]]:
    # With a length in steps or tokens, only the epochs depend on how much data there is.
    about = "≈ " if plan.approximate else ""
    by_data = about if spec.train.epochs is not None else ""
    epochs = f"{about}{plan.total_sequences / plan.num_windows:,.4g}"
    steps = counted(plan.total_steps, "step")
    text = f"{by_data}{steps} of {plan.tokens_per_step:,} tokens: {epochs} epochs"
    rows = [("length", f"{text} of {about}{plan.steps_per_epoch:,.4g} steps")]
    lr = f"{spec.optimizer.lr:g}"
    if spec.scheduler.type == "cosine":
        lr += f" to {plan.lr_final:g}, {spec.scheduler.type} over {by_data}{plan.total_tokens:,} tokens"
    warmup = f", warm-up of {by_data}{counted(plan.warmup_steps, 'step')}" if plan.warmup_steps else ", no warm-up"
    rows.append(("learning rate", lr + warmup))
    return rows


def _step(plan: Plan, spec: Spec, world: World) -> list[tuple[str, str]]:
    batches = "1 micro-batch" if plan.accumulate == 1 else f"{plan.accumulate} micro-batches"
    who = "1 process" if world.num_processes == 1 else f"{world.num_processes} processes"
    share = f"{counted(plan.batch_size, 'sequence')}: {who}, each {batches} of {plan.micro_batch_size}"
    if spec.train.grad_checkpoint:
        share += ", blocks computed again in the backward pass"
    threads = (
        f"{counted(world.num_threads, 'thread')} each"
        if world.num_processes > 1
        else counted(world.num_threads, "thread")
    )
    return [
        ("step", share),
        ("machine", f"{world.device}, {threads}, engine {world.engine}"),
        ("precision", f"{world.precision} ({world.precision_reason})" if world.precision_reason else world.precision),
        ("kernels", f"{world.backend} ({world.backend_reason})" if world.backend_reason else world.backend),
    ]


def _memory(plan: Plan) -> list[tuple[str, str]]:
    use = plan.bytes
    parts = (
        f"{sized(use.weights)} weights + {sized(use.gradients)} gradients + {sized(use.moments)} moments"
        f" + ≈ {sized(use.activations)} activations"
    )
    disk = plan.disk
    return [
        ("memory", f"≈ {sized(use.total)} a process = {parts}"),
        ("disk", f"≈ {sized(disk.total)}: weights {sized(disk.weights_file)} a file, state {sized(disk.state)}"),
    ]


def _writes(plan: Plan, spec: Spec) -> list[tuple[str, str]]:
    about = "≈ " if plan.approximate else ""
    num_saves = plan.save_cadence.num_fired(plan.total_steps)
    ending = f".{spec.save.format}"
    rows = [("writes", f"out/rwkv-init{ending} at the start, out/rwkv-final{ending} at the end")]
    first = _first(plan)
    if first is not None:
        step, name = first
        numbered = f"{plan.save_cadence.words()}: out/{name}{ending} at step {about}{step:,}"
        rest = f" … {about}{num_saves:,} in all, the last {spec.save.keep} are kept" if num_saves > 1 else ""
        rows.append(("", numbered + rest))
    else:
        rows.append(("", f"no numbered save: the run ends before the first ({plan.save_cadence.words()})"))
    if plan.num_eval_documents:
        rows.append(
            ("", f"out/rwkv-best{ending} after each best evaluation, {plan.eval_cadence.words()} and at the end")
        )
    rows.append(("", f"a row of out/metrics.jsonl {plan.log_cadence.words()}, at the first and at the last step"))
    return rows


def _first(plan: Plan) -> tuple[int, str] | None:
    """The first numbered save: step and name. Found by halving, since the number of due saves never falls."""
    low, high = 1, plan.total_steps
    if plan.save_cadence.num_due(high) == 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if plan.save_cadence.num_due(middle) else (middle + 1, high)
    return low, str(plan.saves_at(low))


def counted(count: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sized(num_bytes: int) -> str:
    """Bytes in the largest unit that fits, powers of 1000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
