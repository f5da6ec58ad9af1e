"""`model.graphaccel`: runs the planned steps of a model, and reports on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.arguments import FIRST_STEP, MAX_PROGRAMS, check_hooks
from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.export.export import split_targets
from graphaccel.capture.export.outputs import output_names
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import pytree
from graphaccel.compiler.capture_context import without_autocast
from graphaccel.compiler.compiler import Compiler, forward_schedule, schedule_of
from graphaccel.compiler.ignored_rows import Completed, completed, with_rows
from graphaccel.compiler.input_checks import check_indices, check_positions, shape_changed
from graphaccel.compiler.registered import Registered
from graphaccel.compiler.variants import Variant, Variants, check_autocast
from graphaccel.errors import (
    BatchChanged,
    CaptureDiffers,
    CaptureRefused,
    DeviceOutOfMemory,
    GraphMisuse,
)
from graphaccel.ir.program import StepProgram
from graphaccel.passes.pipeline import backward_of
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.progress import progress
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.eager_step import Subject
from graphaccel.proof.gate import Gate, Now
from graphaccel.proof.gathered import gathered
from graphaccel.proof.planned import Given, Part, parts_of
from graphaccel.proof.trial import run_trial
from graphaccel.report.text import plan_report
from graphaccel.runtime.agreement import BACKWARD, EVALUATE, PLAN, STATE, TRAIN, Agreement
from graphaccel.runtime.broadcast import depends_on, refuse_other_weights, share_capture, share_plan
from graphaccel.runtime.cuda_graphs import recorder_for
from graphaccel.runtime.deferred import RECORD
from graphaccel.runtime.dropped import Dropped, drop_left
from graphaccel.runtime.execution.parts import in_order
from graphaccel.runtime.execution.state import StepResult
from graphaccel.runtime.inductor.compile import StageCompiler, check_compiler
from graphaccel.runtime.init_tape import Record
from graphaccel.runtime.loss_guard import IGNORE, LossGuard
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import build_mesh
from graphaccel.runtime.module import HandOut, Kept, detach, original_class, own_forward
from graphaccel.runtime.parameters.all_gradients import AllGradients, clip_before
from graphaccel.runtime.parameters.gather_for_reading import Reading
from graphaccel.runtime.parameters.host import HostCopies
from graphaccel.runtime.parameters.optimizer_step import OptimizerStep
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import local_of
from graphaccel.runtime.parameters.sharded_optimizer import ShardedOptimizer, check_elementwise
from graphaccel.runtime.parameters.state import (
    OptimizerState,
    full_state,
    sharded_state_dict,
    stage_meshes,
)
from graphaccel.runtime.session import CompiledStep, Session
from graphaccel.runtime.unplanned import HELP, Unplanned
from graphaccel.runtime.wrappers import refuse_around

Optimizer = torch.optim.Optimizer


class Handle:
    """`model.graphaccel`: the plan, its predictions, and reports. Available after the first batch,
    or immediately if an example batch was given."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        compiler: Compiler,
        devices: int,
        device: torch.device,
        timeout: float,
        initial: Record | None = None,
        clip_norm: float | None = None,
        check: str = FIRST_STEP,
        on_nonfinite: str = IGNORE,
        max_programs: int = MAX_PROGRAMS,
    ) -> None:
        self._guard = LossGuard(on_nonfinite, dist.get_rank() if devices > 1 else 0)
        self._initial, self._clip_norm = initial, clip_norm
        self._gate = Gate(on=check == FIRST_STEP, ranks=devices)
        self._model, self._optimizer, self._compiler = model, optimizer, compiler
        self._devices, self._device, self._timeout = devices, device, timeout
        self._agreement = Agreement(devices, device, timedelta(seconds=timeout), optimizer)
        self._unplanned = Unplanned(optimizer, lambda: self.plan is not None)
        self._inner = tuple(model.named_modules())
        self._dtypes: dict[str, torch.dtype] = {}
        self._session: Session | None = None
        self._registered: Registered | None = None
        self._step: StepGraph | None = None
        self._reading = Reading(model)
        self._steps = Variants(max_programs, self._forget)
        self._optimizing: OptimizerStep | None = None
        self._known: AllGradients | None = None
        self._host: HostCopies | None = None
        self._memory: StageMemory | None = None
        self.plan: Plan | None = None
        self.program: StepProgram | None = None
        self.measured_peak_bytes: int | None = None

    # ---- public properties and reports

    def report(self) -> str:
        """The plan as text (`graphaccel plan` prints the same)."""
        if self.plan is None or self._step is None:
            return "no plan yet: it is made when the first training batch comes\n"
        name = original_class(self._model).__name__
        return plan_report(
            self.plan,
            self._step,
            self._compiler.cluster,
            model_name=name,
            assumed=assumed_of(self._optimizer, self.plan),
            layouts=self._compiler.layouts(self._step),
            program=self.program,
        )

    @property
    def predicted_step_seconds(self) -> float | None:
        """Predicted seconds per step."""
        prediction = None if self.plan is None else self.plan.prediction
        return None if prediction is None else prediction.seconds

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak tensor bytes on this rank."""
        return None if self._memory is None else self._memory.tensors

    @property
    def predicted_pass_bytes(self) -> int | None:
        """Predicted peak bytes of tensors on this rank during forward and backward, without
        optimizer state."""
        phases = None if self._memory is None else self._memory.phases
        return None if phases is None else phases.later

    @property
    def predicted_host_bytes(self) -> int | None:
        """Predicted peak bytes of host memory that the plan uses for this rank."""
        return None if self._memory is None else self._memory.host

    def host_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that this rank keeps on the host: the optimizer's state with the copies it
        updates, or the parameters themselves with their gradients."""
        if self._optimizer is None or self._session is None:
            return ()
        found: list[torch.Tensor] = []
        if self._session.away:
            own = [p for p in self._model.parameters() if not isinstance(p, RemoteTensor)]
            found = [local_of(t) for p in own for t in (p, p.grad) if t is not None]
        elif self._host is not None:
            found = [*self._host.tensors()]
        else:
            return ()
        states = self._optimizer.state.values()
        state = (t for values in states for t in values.values() if isinstance(t, torch.Tensor))
        return (*found, *state)

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in an fp16 step; gradients are returned unscaled."""
        scale = None if self._session is None else self._session.scale
        return None if scale is None else float(scale.factor)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the last step, before `clip_norm` clipped: a scalar on this
        rank's device. None before the first step, and without `clip_norm`."""
        return None if self._known is None else self._known.norm

    @property
    def left_to_torch(self) -> tuple[str, ...]:
        """Why (parts of) the last optimizer step were not fused; empty if all of it was."""
        return () if self._optimizing is None else self._optimizing.reasons

    def graph_text(self) -> str:
        """The captured step as text."""
        return "" if self._step is None else self._step.text()

    # ---- what checkpoints need

    @property
    def session(self) -> Session | None:
        """Parameters and state of this rank under the plan; None before there is a plan."""
        return self._session

    @property
    def timeout(self) -> float:
        """Seconds after which a rank that does not answer counts as lost."""
        return self._timeout

    def agree(self, call: str) -> None:
        """Check that all ranks make the same call now. Collective.

        Raises BatchesDiffer (GA404) on every rank, RankLost (GA501) if a rank does not answer.
        """
        self._agreement.check(call)

    # ---- the model's forward and state_dict

    def prepare(
        self, batch: Batch, planned: Callable[[], None] = lambda: None, *, example: bool = True
    ) -> None:
        """Capture, plan and rewrite, then free what this rank does not hold.

        planned: called when nothing can be refused any more, before anything is changed. example:
        whether the first batch to train on may be another one.
        """
        self._agreement.check(PLAN, batch, values=False)
        self._share_capture(batch)
        step, chosen, program = choose_together(self._compiler, batch, self._devices)
        self._agree(chosen)
        check_indices(step, batch)
        check_positions(step, self._compiler.capture(batch)[1])
        check_compiler(chosen.compile, self._device)
        recorder = recorder_for(self._device) if chosen.cuda_graphs else None
        expected = None
        if self._gate.closed:
            pair = self._pair(batch)
            self._gate.prove(step, pair)
            expected = self._gate.expect(pair, chosen, program, example=example)
        planned()
        self._agreement.count_optimizer_steps()
        mesh = build_mesh(
            chosen, program.shared.values(), self._device, timedelta(seconds=self._timeout)
        )
        scale = LossScale(self._device) if chosen.precision.scaled else None
        at = mesh.pipeline_index, mesh.data_index, mesh.coordinate("expert")
        self._memory = self._compiler.device_memory(chosen, program, batch, *at)
        away = "parameters" in chosen.offload
        session = Session(self._model, mesh, scale, chosen.precision.matmul, recorder, away=away)
        optimizer = self._optimizer
        if optimizer is not None and (program.owned or program.resting):
            check_elementwise(optimizer)
        session.settle(program_homes(program), step.tied, optimizer, program, self._initial)
        self._initial = None
        vars(self._model).pop(RECORD, None)
        self._meshes = stage_meshes(session)
        on_host = "optimizer" in chosen.offload
        self._host = HostCopies(mesh.device) if on_host and not away else None
        if optimizer is not None:
            self._before_steps(optimizer, session, bool(chosen.fusions) or on_host, on_host)
        if optimizer is not None and mesh.pipeline > 1:
            optimizer.register_step_pre_hook(_without_remote_gradients)
        if optimizer is not None and (session.states or self._host is not None):
            named = dict(self._model.named_parameters(remove_duplicate=False))
            layouts = session.states if self._host is None else session.step_layouts()
            ShardedOptimizer(optimizer, named, layouts, chosen.bucket_bytes, self._host)
            sharded = {id(named[n]): layout for n, layout in session.states.items()}
            if sharded:
                OptimizerState(optimizer, sharded, self._meshes)
        if self._optimizing is not None:
            self._optimizing.start()
        self._session, self._step, self.plan, self.program = session, step, chosen, program
        self._registered = Registered.of(self._model)
        compiled = self._compiled(step, program, chosen.microbatches, chosen)
        variant = self._add(("train", batch.signature()), batch, step, compiled, example=example)
        if expected is not None:
            trial = partial(self._trial, variant, batch)
            self._gate.keep(expected, batch, self._model, trial, example=example)
        self._dtypes = _dtypes(batch)
        peak = chosen.prediction
        progress(
            "ready", chosen.name + (f", {1e3 * peak.seconds:.0f} ms predicted" if peak else ""), 0.0
        )

    def _pair(self, batch: Batch) -> Pair:
        """The user's model beside the step that was captured from this batch."""
        step, sizes = self._compiler.capture(batch)
        batch = self._compiler.captures.with_numbers(step, batch)
        return pair_of(self._model, self._compiler.model.loss_fn, step, batch, sizes)

    def _compared(self, batch: Batch) -> Pair | str:
        """The model beside the step captured from this batch, on gathered weights where this rank
        has shards; or why there is none. A collective then."""
        if self._whole():
            return self._pair(batch)
        assert self._session is not None
        pair = None
        if self._devices == 1 or dist.get_rank() == 0:
            captures = self._compiler.captures
            step, sizes = self._compiler.capture(batch)
            model, loss_fn = captures.skeleton(), self._compiler.model.loss_fn
            subject = Subject(model, own_forward(model), loss_fn)
            pair = Pair(subject, step, captures.with_numbers(step, batch), sizes)
        return gathered(self._session, self._model, pair)

    def _before_steps(
        self, optimizer: Optimizer, session: Session, fused: bool, on_host: bool
    ) -> None:
        """Register the hooks that must see gradients before our other hooks."""
        scaled = fused and session.scale is not None
        if self._clip_norm is not None or scaled:
            named = self._model.named_parameters()
            elsewhere = [p for n, p in named if session.owner(n) != session.mesh.pipeline_index]
            self._known = AllGradients(
                optimizer, session.mesh, self._clip_norm, scaled=scaled, elsewhere=elsewhere
            )
        if fused:
            self._optimizing = OptimizerStep(optimizer, self._known, on_host=on_host)
        elif self._known is not None:
            clip_before(optimizer, self._known)

    def run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run `model(*args, **kwargs)`."""
        inside = self._compiler.captures.capturing or self._gate.proving
        if module is not self._model or inside:
            return forward(module, *args, **kwargs)
        refuse_around(module)
        training = torch.is_grad_enabled() and self._model.training
        if not training and self._initial is not None:
            raise GraphMisuse(
                what="the model is on the meta device until the first training batch, and was "
                "evaluated before",
                help_line="graphaccel.optimize(model, optimizer, example_batch=batch)",
            )
        if not training and self._whole():
            output = self._plain(forward, args, kwargs)
            self._unplanned.watch(output)
            return output
        batch = flatten_call(args, kwargs)
        if self._reading.active:
            return self._read(training, batch, lambda: forward(module, *args, **kwargs))
        if not training and self._reading.wanted(batch, args, kwargs):
            assert self._session is not None
            with self._reading.around(self._session, keep=False):
                return self._read(training, batch, lambda: self._plain(forward, args, kwargs))
        check_autocast(self._precision(), self._device.type)
        if training:
            check_hooks(self._inner)
            if self._registered is not None:
                self._registered.check(self._model)
        with without_autocast():
            return self._train(batch) if training else self._evaluate(batch)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around `model.generate()`: calls of the model read weights that are gathered once, or for
        each op where memory does not hold all. Collective where this rank has a part of them."""
        if self._whole() or self._reading.active:
            yield
            return
        assert self._session is not None
        self._agreement.check(EVALUATE)
        with self._reading.around(self._session, keep=True):
            yield

    def _read(self, training: bool, batch: Batch, call: Callable[[], Any]) -> Any:
        """One call of the model's own forward on gathered weights."""
        if training:
            raise GraphMisuse(
                what="a training step inside of model.generate()",
                help_line="with torch.no_grad(): tokens = model.generate(...)",
            )
        self._refuse_gradients()
        self._agreement.check(EVALUATE, batch)
        return call()

    def _precision(self) -> Precision:
        """The plan's precision, or the one that a plan will have."""
        plan = self.plan or self._compiler.plan
        pinned = self._compiler.pins.get("precision") or "fp32"
        return PRECISIONS[pinned] if plan is None else plan.precision

    def _train(self, batch: Batch) -> Any:
        program = self.program
        random = program is not None and (program.random or program.shared_draws)
        state = self._compiler.captures.state_digest(batch)
        given = self._agreement.check(TRAIN, batch, random=random, state=state)
        if self._agreement.steps == 1 and self._whole():
            refuse_other_weights(self._model, self._devices)
        if self.plan is None:
            try:
                self.prepare(batch, example=False)
            except CaptureDiffers:
                detach(self._model)
                raise
        assert self._session is not None
        assert self.plan is not None
        assert self._step is not None
        check_indices(self._step, batch)
        more = self._completed(batch)
        if more is not None:
            batch, given = with_rows(batch, more), more.leaves(given)
        variant = self._training_step(batch)
        compiled = variant.compiled
        self._session.follow()
        now = Now(
            batch,
            self._whole(),
            lambda: self._compiler.capture(batch)[0],
            lambda: self._compared(batch),
            self.plan,
            compiled.program,
            self._session.mesh,
        )
        self._gate.before(now, self._model, partial(self._trial, variant, batch))
        leaves = variant.leaves(self._session, given)
        reached = compiled.reached
        named = [(n, p) for n, p in self._model.named_parameters() if n in reached]
        if compiled.backward is not None:
            self._guard.refuse_outside()
            tracked = frozenset(compiled.program.tangents)
            agree = partial(self._agreement.check, BACKWARD)
            outputs = self._session.call(compiled, leaves, tracked, named, agree)
            drop_left(self._model, variant.left)
            return compiled.rebuild(None, outputs if more is None else more.cut(outputs))
        try:
            result = self._session.step(compiled, leaves)
        except DeviceOutOfMemory as error:
            raise self._beside_prediction(error) from error.__cause__
        self._gate.spoilt(result.overflow)
        self._gate.check(lambda: self._given(result, compiled.program), self._session.mesh)
        drop_left(self._model, variant.left)
        result, skipped = self._guard.checked(result)
        # our own optimizer step can skip an update
        marks = self._optimizing is not None and not skipped
        names, parameters = [n for n, _ in named], [p for _, p in named]
        loss = HandOut.apply(result, marks, self._offloaded(), tuple(names), *parameters)
        return compiled.rebuild(loss, result.outputs if more is None else more.cut(result.outputs))

    def _beside_prediction(self, error: DeviceOutOfMemory) -> DeviceOutOfMemory:
        """The error with what was predicted for this rank."""
        assert self.plan is not None
        memory = self._memory
        predicted = {} if memory is None else {"tensors": memory.tensors, "other": memory.other}
        return DeviceOutOfMemory(
            stage=error.stage,
            action=error.action,
            predicted=predicted,
            actual=error.actual,
            recompute=not self.plan.recompute,
        )

    def _completed(self, batch: Batch) -> Completed | None:
        """How a batch that the plan cannot split evenly is completed, if it is one. Collective."""
        assert self._step is not None
        assert self.plan is not None

        def captured(whole: Batch) -> StepGraph:
            self._share_capture(whole)
            return self._compiler.capture(whole)[0]

        return completed(self._step, self.plan, batch, captured)

    def _given(self, result: StepResult, program: StepProgram) -> Given:
        """The results of a step of this program on this rank."""
        assert self._session is not None
        buffers = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        values = (v for p in program.stages for v in p.forward_outputs if v.kind == "buffer")
        written = {v.name for v in values if v.name in buffers and self._session.holds(v.name)}
        held = {n: buffers[n].detach() for n in written}
        return Given(
            result.loss, result.outputs, result.gradients, result.layouts, held, result.inputs
        )

    def _trial(self, variant: Variant, batch: Batch, constant: bool) -> Mapping[str, Part] | None:
        """The results on this rank of a step that updates nothing; None where it overflowed."""
        assert self._session is not None

        def seen(result: StepResult) -> Mapping[str, Part] | None:
            overflowed = result.overflow is not None and bool(result.overflow)
            given = None if overflowed else self._given(result, variant.compiled.program)
            return None if given is None else parts_of(given)

        leaves = variant.leaves(self._session, batch.leaves)
        return run_trial(self._session, variant.compiled, leaves, seen, constant=constant)

    def _whole(self) -> bool:
        """Whether the model's own forward can run here: full parameters, none offloaded."""
        return self.has_all() and not self._offloaded()

    def has_all(self) -> bool:
        """Whether this rank holds every parameter in full."""
        session = self._session
        return session is None or (session.mesh.pipeline == 1 and not session.parameters)

    def _offloaded(self) -> bool:
        """Whether parameters are on the host, where the model's own forward cannot run."""
        return self._session is not None and self._session.away

    def _plain(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the user's own forward, followed by the loss function if there is one."""
        loss_fn = self._compiler.model.loss_fn
        if not callable(loss_fn):
            return forward(self._model, *args, **kwargs)
        args, kwargs, targets = split_targets(loss_fn, args, kwargs)
        return loss_fn(forward(self._model, *args, **kwargs), *targets)

    def state_dict(self, plain: Any, prefix: str) -> Any:
        """Add to `model.state_dict()` what other ranks hold."""
        if self._session is None or self.has_all():
            return plain
        return sharded_state_dict(self._session, self._meshes, plain, prefix)

    def full_state(self, module: nn.Module) -> dict[str, Any]:
        """`full_state_dict` of the model, or of a copy of it with the same sharding."""
        plain = original_class(module).state_dict(module)
        if self._session is None:
            return {k: v.detach().cpu().clone() for k, v in plain.items()}
        if not self.has_all():
            self._agreement.check(STATE)
        return full_state(self._session, plain)

    # ---- compiled steps

    def _training_step(self, batch: Batch) -> Variant:
        key = ("train", batch.signature())
        known = self._steps.find(key)
        if known is not None:
            return known
        assert self.plan is not None
        assert self._session is not None
        self._refuse_other(batch)
        assert self._step is not None
        try:
            self._share_capture(batch)
            check_positions(*self._compiler.capture(batch))
        except CaptureRefused as error:
            raise shape_changed(self._step, batch) or error from error
        step, program = self._compiler.compile(
            batch, self.plan, self._session.homes, self._session.groups
        )
        self._gate.later(step, lambda: self._compared(batch), whole=self._whole())
        compiled = self._compiled(step, program, self.plan.microbatches, self.plan)
        return self._add(key, batch, step, compiled)

    def _add(
        self,
        key: Any,
        batch: Batch,
        step: StepGraph,
        compiled: CompiledStep,
        *,
        example: bool = False,
    ) -> Variant:
        guards = self._compiler.captures.guards(step, batch)
        left = self._compiler.captures.left(step)
        return self._steps.add(key, Variant(compiled, guards, left), example=example)

    def _forget(self, compiled: CompiledStep) -> None:
        assert self._session is not None
        self._session.forget(compiled)

    def _refuse_other(self, batch: Batch) -> None:
        """Raise for a batch with other inputs or dtypes; one of other sizes is captured anew."""
        found = _dtypes(batch)
        if set(found) != set(self._dtypes):
            expected, got = ", ".join(self._dtypes), ", ".join(found)
            raise BatchChanged(what="the inputs of the model", expected=expected, got=got)
        for name, dtype in found.items():
            if dtype != self._dtypes[name]:
                raise BatchChanged(
                    what=f"dtype of {name}", expected=str(self._dtypes[name]), got=str(dtype)
                )

    def _evaluate(self, batch: Batch) -> Any:
        assert self.plan is not None
        assert self._session is not None
        assert self._step is not None
        self._refuse_gradients()
        state = self._compiler.captures.state_digest(batch, training=self._model.training)
        given = self._agreement.check(EVALUATE, batch, state=state)
        key = (self._model.training, batch.signature())
        variant = self._steps.find(key)
        check_indices(self._step, batch)
        if variant is None:
            step, program = self._compiler.compile_evaluation(
                batch,
                self.plan,
                self._session.homes,
                self._model.training,
                self._session.groups,
            )
            self._gate.later(step, None, whole=False)
            variant = self._add(key, batch, step, self._compiled(step, program, 1, None))
        compiled = variant.compiled
        self._session.follow()
        leaves = variant.leaves(self._session, given)
        with torch.no_grad():
            result = self._session.evaluate(compiled, leaves)
        drop_left(self._model, variant.left)
        return compiled.rebuild(result.loss, result.outputs)

    def _refuse_gradients(self) -> None:
        """Raises GraphMisuse (GA407) for an evaluation whose gradients would be lost."""
        assert self.plan is not None
        if torch.is_grad_enabled() and not self._model.training:
            raise GraphMisuse(
                what="a forward in evaluation mode with gradients enabled, under "
                + ("a pipeline" if self.plan.pipeline > 1 else "sharded parameters"),
                help_line="to evaluate:  with torch.no_grad(): output = model(batch)",
                other_help=f"to train with dropout off and batch statistics fixed:  {HELP}",
            )

    def _compiled(
        self, step: StepGraph, program: StepProgram, microbatches: int, chosen: Plan | None
    ) -> CompiledStep:
        assert self.plan is not None or chosen is not None
        used = chosen or self.plan
        assert used is not None
        schedule = (
            schedule_of(used, program) if chosen is not None else forward_schedule(used, program)
        )
        outside = program.bare is not None
        return CompiledStep(
            program,
            schedule,
            microbatches,
            {n: c.clone() for n, c in step.forward.constants.items()},  # the model's, as they are
            _rebuilder(step),
            (lambda outputs: backward_of(program, used, outputs)) if outside else None,
            StageCompiler(progress, not used.min_cut) if used.compile != "off" else None,
        )

    def _share_capture(self, batch: Batch) -> None:
        """Capture on one rank, and send the result to the others."""
        if self._devices == 1:
            return
        compiler = self._compiler
        share_capture(
            compiler.captures.knows(batch),
            depends_on(self._model, batch.signature(), compiler.model.loss_fn),
            lambda: compiler.capture(batch)[0],
            lambda step: compiler.captures.keep(batch, step),
        )

    def _agree(self, chosen: Plan) -> None:
        """Compare the plan across ranks: all must run the same one."""
        if self._devices == 1:
            return
        plans: list[Any] = [None] * self._devices
        dist.all_gather_object(plans, chosen.to_json())
        if len(set(plans)) > 1:
            raise GraphMisuse(
                what="the ranks chose different plans: their models, batches or versions differ",
                help_line="seed every rank alike and give them the same example batch",
            )


def choose_together(
    compiler: Compiler, batch: Batch, ranks: int
) -> tuple[StepGraph, Plan, StepProgram]:
    """`compiler.choose` on one rank for all; each rank builds its programs. Collective."""
    here: list[tuple[StepGraph, Plan, StepProgram]] = []

    def choose() -> Plan:
        here.append(compiler.choose(batch))
        return here[0][1]

    if ranks > 1:
        share_plan(compiler.plan is not None, compiler.digest(batch), choose, compiler.adopt)
    return here[0] if here else compiler.choose(batch)


def program_homes(program: StepProgram) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer name → the stages that hold it."""
    homes: dict[str, tuple[int, ...]] = {}
    for stage in program.stages:
        for name in (*stage.parameters, *stage.buffers):
            homes[name] = (*homes.get(name, ()), stage.stage)
    return homes


def _dtypes(batch: Batch) -> dict[str, torch.dtype]:
    return {batch.names[i]: t.dtype for i, t in batch.tensors.items()}


def _rebuilder(step: StepGraph) -> Callable[[torch.Tensor | None, Mapping[int, torch.Tensor]], Any]:
    returned = step.forward.returned
    spec = returned.spec
    names = output_names(pytree.tree_unflatten(list(range(returned.num_leaves)), spec))

    def rebuild(loss: torch.Tensor | None, outputs: Mapping[int, torch.Tensor]) -> Any:
        leaves: list[Any] = []
        for i in range(returned.num_leaves):
            if i == returned.loss_leaf and loss is not None:
                leaves.append(loss)
            elif i in outputs:
                kept = loss is not None and loss.requires_grad and i in returned.tracked
                name, output = names.get(i, f"output {i}"), in_order(outputs[i], returned.orders[i])
                leaves.append(Kept.apply(name, output, loss) if kept else output)
            else:
                leaves.append(returned.plain.get(i, Dropped(names.get(i, f"output {i}"))))
        return pytree.tree_unflatten(leaves, spec)

    return rebuild


def _without_remote_gradients(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, RemoteTensor):
                parameter.grad = None


def assumed_of(optimizer: Optimizer | None, plan: Plan) -> str:
    """What a report assumes: the optimizer state, and how tokens choose experts."""
    state = "no optimizer state" if optimizer is None else type(optimizer).__name__
    if plan.expert == 1:
        return state
    chosen = () if plan.prediction is None else plan.prediction.chosen
    if not chosen:
        return f"{state}; each expert chosen as often as the others"
    most = max(share for block in chosen for row in block.shares for share in row)
    as_batch = (
        f"experts chosen as the example batch does, a device up to {most:.2f} of an even share"
    )
    return f"{state}; {as_batch}"
