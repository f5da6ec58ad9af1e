"""Prepares a run: capture, plan and rewrite, then lay out the memory of this rank."""

from __future__ import annotations

from collections.abc import Callable

from graphaccel.arguments import FIRST_STEP
from graphaccel.capture.batch import Batch
from graphaccel.compiler.compiler import Planned
from graphaccel.compiler.input_checks import check_indices, check_positions
from graphaccel.compiler.registered import Registered
from graphaccel.dispatch.comparisons import model_pair
from graphaccel.dispatch.optimizers import refuse_closure, state_keys
from graphaccel.dispatch.run import Prepared, Run, dtypes_of
from graphaccel.dispatch.shared_memory import check_shared_memory
from graphaccel.dispatch.together import capture_together, check_same_plan, choose_together
from graphaccel.dispatch.updates import register_updates, shards_later
from graphaccel.errors import Unsupported
from graphaccel.ir.program import StepProgram
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.proof.planned import Expected
from graphaccel.runtime.agreement import PLAN
from graphaccel.runtime.copies import Copies
from graphaccel.runtime.cuda_graphs import Recorder, recorder_for
from graphaccel.runtime.deferred import RECORD
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.inductor.compile import check_compiler
from graphaccel.runtime.init_tape import InitTape
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import build_mesh
from graphaccel.runtime.parameters.state import stage_meshes
from graphaccel.runtime.parameters.swap import forget_graphs
from graphaccel.runtime.session import Session


def prepare(
    run: Run,
    batch: Batch,
    initial: InitTape | None,
    planned: Callable[[], None],
    *,
    example: bool,
) -> tuple[Prepared, Expected | str | None]:
    """Capture, plan and rewrite, then free what this rank does not hold. Collective.

    initial: how to initialise a model on the meta device. planned: called when nothing can be
    refused any more, before anything is changed. example: whether the first batch to train on may
    be another one. Returns also what the first step must give (`Gate.expect`).
    """
    forget_graphs(run.model)
    run.agreement.check(PLAN, batch, values=False)
    capture_together(run, batch)
    chosen = choose_together(run.compiler, batch, run.settings.devices)
    check_same_plan(chosen.plan, run.settings.devices)
    check_indices(chosen.step, batch, first=True)
    check_positions(chosen.step, run.compiler.capture(batch)[1])
    check_shared_memory(run.model, chosen)
    check_compiler(chosen.plan.compile, run.settings.device)
    recorder = recorder_for(run.settings.device) if chosen.plan.cuda_graphs else None
    keys = None if run.optimizer is None else state_keys(run.optimizer, chosen)
    expected = _expected(run, batch, chosen, example=example)
    _check_asked(run, chosen)
    planned()
    # from here on the optimizer, the model and memory are changed
    run.agreement.count_optimizer_steps()
    session, memory = _session(run, batch, chosen, recorder)
    program, optimizer = chosen.program, run.optimizer
    session.settle(program_homes(program), chosen.step.tied, optimizer, program, initial)
    vars(run.model).pop(RECORD, None)
    run.agreement.compare_weights(Copies(run.model.parameters(), session.mesh))
    meshes = stage_meshes(session, later=shards_later(chosen))
    clip = run.settings.clip_norm
    hooks = run.hooks
    compare = run.settings.check == FIRST_STEP
    if session.mesh.pipeline > 1:
        hooks.add(refuse_closure)
    updates = register_updates(
        run.model, optimizer, hooks, chosen, session, clip, meshes, keys, compare=compare
    )
    buffers = {spec.name for spec in chosen.step.inputs if spec.kind == "buffer"}
    registered = Registered.of(run.model, buffers)
    prepared = Prepared(chosen, session, memory, meshes, updates, registered, dtypes_of(batch))
    return prepared, expected


def _check_asked(run: Run, chosen: Planned) -> None:
    """Raises Unsupported (GA208) for a buffer whose value each rank asks for before a step, where
    one stage has its new value."""
    if chosen.plan.pipeline == 1:
        return
    for output in chosen.step.outputs:
        if output.kind == "buffer" and output.name in run.compiler.captures.asked:
            raise Unsupported(
                what=f"a branch on the buffer `{output.name}`, which the forward also changes,",
                reason="one stage of the pipeline has its new value, and every rank needs it to "
                "choose the graph",
                help_line="run the forward that changes it before:  model(batch)  "
                "# then graphaccel.optimize(model, optimizer)",
                other_help="or without a pipeline:  pipeline=1",
            )


def _expected(run: Run, batch: Batch, chosen: Planned, *, example: bool) -> Expected | str | None:
    """Compare the captured step with eager code; returns what the plan's first step must give."""
    if not run.gate.closed:
        return None
    pair = model_pair(run, batch)
    run.gate.prove(chosen.step, pair)
    return run.gate.expect(pair, chosen.plan, chosen.program, example=example)


def _session(
    run: Run, batch: Batch, chosen: Planned, recorder: Recorder | None
) -> tuple[Session, StageMemory | None]:
    """The session of this rank, and its predicted memory, for which parameters are full yet."""
    plan, settings = chosen.plan, run.settings
    shared = chosen.program.shared.values()
    with answered("the groups of ranks of the plan"):
        mesh = build_mesh(plan, shared, settings.device, settings.patience)
    scale = LossScale(settings.device) if plan.precision.scaled else None
    at = mesh.pipeline_index, mesh.data_index, mesh.coordinate("expert")
    memory = run.compiler.memory(chosen, batch).of_device(*at)
    offloads_parameters = "parameters" in plan.offload
    session = Session(
        run.model, mesh, scale, plan.precision.matmul, recorder, offloaded=offloads_parameters
    )
    return session, memory


def program_homes(program: StepProgram) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer name → the stages that hold it."""
    homes: dict[str, tuple[int, ...]] = {}
    for stage in program.stages:
        for name in (*stage.parameters, *stage.buffers):
            homes[name] = (*homes.get(name, ()), stage.stage)
    return homes
