"""`model.graphaccel`: runs the planned steps of a model, and reports on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.arguments import check_hooks
from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.export.export import split_targets
from graphaccel.compat.torch.autograd import inside_transform
from graphaccel.compiler.capture_context import without_autocast
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.ignored_rows import with_rows
from graphaccel.dispatch.call_form import CallForm
from graphaccel.dispatch.comparisons import step_results, trial_step, whole_pair
from graphaccel.dispatch.eager_errors import eager_errors
from graphaccel.dispatch.local_batch import joined, own_rows
from graphaccel.dispatch.prepare import prepare
from graphaccel.dispatch.run import Prepared, Run
from graphaccel.dispatch.steps import Steps
from graphaccel.dispatch.variants import Variant, check_around
from graphaccel.errors import CaptureDiffers, DeviceOutOfMemory, GraphMisuse
from graphaccel.ir.program import StepProgram
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.progress import progress
from graphaccel.proof.gate import Gate, Now
from graphaccel.report.assumptions import assumed_of
from graphaccel.report.text import plan_report
from graphaccel.report.throughput import throughput_of
from graphaccel.runtime.agreement import BACKWARD, EVALUATE, PLAN, STATE, TRAIN
from graphaccel.runtime.broadcast import refuse_other_weights
from graphaccel.runtime.dropped import drop_left
from graphaccel.runtime.init_tape import InitTape
from graphaccel.runtime.loss_guard import LossGuard
from graphaccel.runtime.module import HandOut, detach, original_class
from graphaccel.runtime.parameters.gather_for_reading import Reading
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import local_of
from graphaccel.runtime.parameters.state import full_state, sharded_state_dict
from graphaccel.runtime.session import Session
from graphaccel.runtime.unplanned import HELP, Unplanned
from graphaccel.runtime.wrappers import refuse_around, refuse_transformed


class Handle:
    """`model.graphaccel`: the plan, its predictions, and reports. Available after the first batch,
    or immediately if an example batch was given."""

    def __init__(self, run: Run, initial: InitTape | None = None) -> None:
        """initial: how to initialise a model on the meta device."""
        self._run, self._initial = run, initial
        rank = dist.get_rank() if run.settings.devices > 1 else 0
        self._guard = LossGuard(run.settings.on_nonfinite, rank)
        self._reading = Reading(run.model)
        self._unplanned = Unplanned(run.model, run.optimizer, lambda: self.plan is not None)
        self._prepared: Prepared | None = None
        self.steps: Steps | None = None
        self._form = CallForm(run.model.forward)

    def watch_steps(self) -> None:
        """Refuse the optimizer's steps without a plan from now on."""
        if (optimizer := self._run.optimizer) is not None:
            self._run.hooks.add_first(self._unplanned.before_step)
            self._run.hooks.start(optimizer)
            step = None if self._prepared is None else self._prepared.updates.step
            if step is not None:  # prepared with an example batch: its own hook comes last
                step.start()

    # ---- public properties and reports

    @property
    def plan(self) -> Plan | None:
        """The plan; None before it is chosen."""
        return None if self._prepared is None else self._prepared.planned.plan

    @property
    def program(self) -> StepProgram | None:
        """The programs of the plan's stages, as every rank builds them; None before the plan."""
        return None if self._prepared is None else self._prepared.planned.program

    def report(self) -> str:
        """The plan as text (`graphaccel plan` prints the same)."""
        if self._prepared is None:
            return "no plan yet: it is made when the first training batch comes\n"
        planned = self._prepared.planned
        return plan_report(
            planned.plan,
            planned.step,
            planned.cluster,
            model_name=original_class(self._run.model).__name__,
            assumed=assumed_of(self._run.optimizer, planned.plan),
            layouts=self.compiler.layouts(planned.step),
            program=planned.program,
        )

    @property
    def predicted_step_seconds(self) -> float | None:
        """Predicted seconds per step."""
        prediction = None if self.plan is None else self.plan.prediction
        return None if prediction is None else prediction.seconds

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak tensor bytes on this rank."""
        memory = None if self.steps is None else self.steps.memory
        return None if memory is None else memory.tensors

    @property
    def predicted_pass_bytes(self) -> int | None:
        """Predicted peak bytes of tensors on this rank during forward and backward, without
        optimizer state."""
        memory = None if self.steps is None else self.steps.memory
        phases = None if memory is None else memory.phases
        return None if phases is None else phases.later

    @property
    def predicted_host_bytes(self) -> int | None:
        """Predicted peak bytes of host memory that the plan uses for this rank."""
        memory = None if self.steps is None else self.steps.memory
        return None if memory is None else memory.host

    def utilisation(self, seconds: float) -> float | None:
        """Model FLOPs utilisation (MFU), 0 to 1, of a step of the planned batch that took so many
        seconds: FLOPs of forward and backward / (seconds x devices x peak of a device)."""
        if self._prepared is None:
            return None
        planned = self._prepared.planned
        step, plan, once = planned.step, planned.plan, planned.step.analyses.cached
        throughput = once((plan.batch, plan.precision), throughput_of, step, plan, planned.cluster)
        return throughput.utilisation(seconds, planned.plan.devices)

    def host_tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that this rank keeps on the host: the optimizer's state with the copies it
        updates, or the parameters themselves with their gradients."""
        prepared, optimizer = self._prepared, self._run.optimizer
        if optimizer is None or prepared is None:
            return ()
        if prepared.session.away:
            own = [p for p in self._run.model.parameters() if not isinstance(p, RemoteTensor)]
            held = [local_of(t) for p in own for t in (p, p.grad) if t is not None]
        elif prepared.updates.host is not None:
            held = [*prepared.updates.host.tensors()]
        else:
            return ()
        states = optimizer.state.values()
        state = (t for values in states for t in values.values() if isinstance(t, torch.Tensor))
        return (*held, *state)

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in an fp16 step; gradients are returned unscaled."""
        scale = None if self.session is None else self.session.scale
        return None if scale is None else float(scale.factor)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the last step, before `clip_norm` clipped: a scalar on this
        rank's device. None before the first step, and without `clip_norm`."""
        gradients = None if self._prepared is None else self._prepared.updates.gradients
        return None if gradients is None else gradients.norm

    @property
    def left_to_torch(self) -> tuple[str, ...]:
        """Why (parts of) the last optimizer step were not fused; empty if all of it was."""
        step = None if self._prepared is None else self._prepared.updates.step
        return () if step is None else step.reasons

    def graph_text(self) -> str:
        """The captured step as text."""
        return "" if self._prepared is None else self._prepared.planned.step.text()

    # ---- what checkpoints and tools need

    @property
    def session(self) -> Session | None:
        """Parameters and state of this rank under the plan; None before there is a plan."""
        return None if self._prepared is None else self._prepared.session

    @property
    def timeout(self) -> float:
        """Seconds after which a rank that does not answer counts as lost."""
        return self._run.settings.timeout

    def agree(self, call: str) -> None:
        """Check that all ranks make the same call now. Collective.

        Raises BatchesDiffer (GA404) on every rank, RankLost (GA501) if a rank does not answer.
        """
        self._run.agreement.check(call)

    # ---- the model's forward and state_dict

    def prepare(
        self, batch: Batch, planned: Callable[[], None] = lambda: None, *, example: bool = True
    ) -> None:
        """Capture, plan and rewrite, then free what this rank does not hold
        (`dispatch.prepare`)."""
        run = self._run
        called = self._form.same(*batch.rebuild(batch.leaves))
        if example:
            batch = flatten_call(*self._form.with_numbers(*called))
            batch = joined(run, PLAN, batch, None).batch
        with eager_errors(run.model, run.compiler.model.loss_fn, batch):
            prepared, expected = prepare(run, batch, self._initial, planned, example=example)
        steps = Steps(run, prepared)
        self._initial, self._prepared, self.steps = None, prepared, steps
        variant = steps.first(batch, example=example)
        if expected is not None:
            trial = partial(trial_step, run, prepared, variant, batch)
            run.gate.keep(expected, batch, run.model, trial, example=example)
        plan = prepared.planned.plan
        peak = plan.prediction
        said = plan_name(plan) + (f", {1e3 * peak.seconds:.0f} ms predicted" if peak else "")
        progress("ready", said, 0.0)

    @property
    def compiler(self) -> Compiler:
        """Captures and plans the model."""
        return self._run.compiler

    @property
    def gate(self) -> Gate:
        """Comparisons of the first step with eager code."""
        return self._run.gate

    def run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run `model(*args, **kwargs)`."""
        model = self._run.model
        inside = self.compiler.captures.capturing or self.gate.proving
        if module is not model or inside:
            return forward(module, *args, **kwargs)
        refuse_around(module)
        if inside_transform():
            refuse_transformed(whole=self._whole())
            return self._plain(forward, args, kwargs)
        training = torch.is_grad_enabled() and model.training
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
        args, kwargs = self._form.same(args, kwargs)
        batch = flatten_call(*self._form.with_numbers(args, kwargs))
        if self._reading.active:
            return self._read(training, batch, lambda: forward(module, *args, **kwargs))
        if not training and self._reading.wanted(batch, args, kwargs):
            assert self.session is not None
            with self._reading.around(self.session, keep=False):
                return self._read(training, batch, lambda: self._plain(forward, args, kwargs))
        check_around(self._precision(), self._run.settings.device.type)
        returns_loss = training and callable(self.compiler.model.loss_fn)
        check_hooks(model.named_modules(), returns_loss=returns_loss)
        with without_autocast():
            return self._train(batch) if training else self._evaluate(batch)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around `model.generate()`: calls of the model read weights that are gathered once, or for
        each op where memory does not hold all. Collective where this rank has a part of them."""
        if self._whole() or self._reading.active:
            yield
            return
        assert self.session is not None
        self._run.agreement.check(EVALUATE)
        with self._reading.around(self.session, keep=True):
            yield

    def _read(self, training: bool, batch: Batch, call: Callable[[], Any]) -> Any:
        """One call of the model's own forward on gathered weights."""
        if training:
            raise GraphMisuse(
                what="a training step inside of model.generate()",
                help_line="with torch.no_grad(): tokens = model.generate(...)",
            )
        self._refuse_gradients()
        # weights that are read here are gathered: a digest would be a collective
        self._run.agreement.check(EVALUATE, batch, weights=False)
        return call()

    def _precision(self) -> Precision:
        """The plan's precision, or the one that a plan will have."""
        plan = self.plan or self.compiler.given
        pinned = self.compiler.pins.get("precision") or "fp32"
        return PRECISIONS.get(pinned, Precision()) if plan is None else plan.precision

    def _train(self, batch: Batch) -> Any:
        run = self._run
        program, prepared = self.program, self._prepared
        trained = None if prepared is None else prepared.registered.check(run.model)
        whole = joined(run, TRAIN, batch, self._prepared)
        batch = whole.batch
        random = program is not None and (program.random or program.shared_draws)
        state = run.compiler.captures.state_digest(batch, trained=trained)
        leaves = run.agreement.check(TRAIN, batch, random=random, state=state, trained=trained)
        if run.agreement.steps == 1 and self._whole():
            refuse_other_weights(run.model, run.settings.devices)
        if self._prepared is None:
            try:
                self.prepare(batch, example=False)
            except CaptureDiffers:
                detach(run.model)
                raise
        prepared, steps = self._prepared, self.steps
        assert prepared is not None
        assert steps is not None
        more = steps.completed(batch)
        if more is not None:
            batch, leaves = with_rows(batch, more), more.leaves(leaves)
        variant = steps.training(batch, trained or frozenset())
        self._form.after_step(variant.guards.numbers)
        prepared.session.follow()
        self._compare_before(batch, prepared, variant)
        leaves = variant.leaves(prepared.session, leaves)
        built = self._call if variant.compiled.backward is not None else self._step
        loss, outputs = built(prepared, variant, leaves)
        outputs = own_rows(run, whole, variant.step, outputs if more is None else more.cut(outputs))
        return variant.compiled.rebuild(loss, outputs)

    def _compare_before(self, batch: Batch, prepared: Prepared, variant: Variant) -> None:
        """What `Gate.before` compares before the step of a batch."""
        run, planned = self._run, prepared.planned
        now = Now(
            batch,
            prepared.whole,
            lambda: run.compiler.capture(batch)[0],
            lambda: whole_pair(run, prepared, batch),
            planned.plan,
            variant.compiled.program,
            prepared.session.mesh,
        )
        trial = partial(trial_step, run, prepared, variant, batch)
        run.gate.before(now, run.model, trial)

    def _call(
        self, prepared: Prepared, variant: Variant, leaves: tuple[Any, ...]
    ) -> tuple[None, Mapping[int, torch.Tensor]]:
        """Run a forward whose loss the script computes; returns the outputs by leaf."""
        self._guard.refuse_outside()
        run, compiled = self._run, variant.compiled
        tracked = frozenset(compiled.program.tangents)
        agree = partial(run.agreement.check, BACKWARD)
        named = self._reached(variant)
        outputs = prepared.session.call(compiled, leaves, tracked, named, agree)
        drop_left(run.model, variant.left)
        return None, outputs

    def _step(
        self, prepared: Prepared, variant: Variant, leaves: tuple[Any, ...]
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Run a training step; returns the loss, and the other outputs by leaf."""
        run, compiled, session = self._run, variant.compiled, prepared.session
        named = self._reached(variant)
        try:
            result = session.step(compiled, leaves)
        except DeviceOutOfMemory as error:
            assert self.steps is not None
            raise self.steps.beside_prediction(error) from error.__cause__
        run.gate.spoilt(result.overflow)
        given = partial(step_results, run, prepared, result, compiled.program)
        run.gate.check(given, session.mesh)
        drop_left(run.model, variant.left)
        result, skipped = self._guard.checked(result)
        marks = frozenset() if skipped else prepared.updates.marked(run.optimizer)
        names, parameters = [n for n, _ in named], [p for _, p in named]
        loss = HandOut.apply(result, marks, session.away, tuple(names), *parameters)
        return loss, result.outputs

    def _reached(self, variant: Variant) -> list[tuple[str, nn.Parameter]]:
        """The parameters that get a gradient."""
        reached = variant.compiled.reached
        return [(n, p) for n, p in self._run.model.named_parameters() if n in reached]

    def _evaluate(self, batch: Batch) -> Any:
        run, prepared, steps = self._run, self._prepared, self.steps
        assert prepared is not None
        assert steps is not None
        self._refuse_gradients()
        whole = joined(run, EVALUATE, batch, self._prepared)
        batch = whole.batch
        state = run.compiler.captures.state_digest(batch, training=run.model.training)
        leaves = run.agreement.check(EVALUATE, batch, state=state)
        variant = steps.evaluation(batch)
        prepared.session.follow()
        leaves = variant.leaves(prepared.session, leaves)
        with torch.inference_mode(False), torch.no_grad():  # what an executor keeps serves later
            result = prepared.session.evaluate(variant.compiled, leaves)
        drop_left(run.model, variant.left)
        outputs = own_rows(run, whole, variant.step, result.outputs)
        return variant.compiled.rebuild(result.loss, outputs)

    def _refuse_gradients(self) -> None:
        """Raises GraphMisuse (GA407) for an evaluation whose gradients would be lost."""
        assert self.plan is not None
        if torch.is_grad_enabled() and not self._run.model.training:
            raise GraphMisuse(
                what="a forward in evaluation mode with gradients enabled, under "
                + ("a pipeline" if self.plan.pipeline > 1 else "sharded parameters"),
                help_line="to evaluate:  with torch.no_grad(): output = model(batch)",
                other_help=f"to train with dropout off and batch statistics fixed:  {HELP}",
            )

    def _plain(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the user's own forward, followed by the loss function if there is one."""
        loss_fn = self.compiler.model.loss_fn
        if not callable(loss_fn):
            return forward(self._run.model, *args, **kwargs)
        args, kwargs, targets = split_targets(loss_fn, args, kwargs)
        return loss_fn(forward(self._run.model, *args, **kwargs), *targets)

    def _whole(self) -> bool:
        """Whether the model's own forward can run here: full parameters, none offloaded."""
        return self._prepared is None or self._prepared.whole

    def has_all(self) -> bool:
        """Whether this rank holds every parameter in full."""
        return self._prepared is None or self._prepared.has_all

    def state_dict(self, plain: Any, prefix: str) -> Any:
        """Add to `model.state_dict()` what other ranks hold."""
        prepared = self._prepared
        if prepared is None or prepared.has_all:
            return plain
        return sharded_state_dict(prepared.session, prepared.meshes, plain, prefix)

    def full_state(self, module: nn.Module) -> dict[str, Any]:
        """`full_state_dict` of the model, or of a copy of it with the same sharding."""
        plain = original_class(module).state_dict(module)
        if self._prepared is None:
            return {k: v.detach().cpu().clone() for k, v in plain.items()}
        if not self.has_all():
            self._run.agreement.check(STATE)
        return full_state(self._prepared.session, plain)
