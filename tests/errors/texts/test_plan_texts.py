"""The full text of every error about plans and rules."""

from __future__ import annotations

import pytest

from graphaccel import errors

GIB = 2**30
MIB = 2**20

CASES = [
    (
        errors.InfeasiblePlan(
            devices=8,
            memory=24 * GIB,
            peak=26 * GIB + 320 * MIB,
            stage=0,
            closest="data 1 x pipeline 8, 32 microbatches of 1, recompute all",
            breakdown={"param": 1600 * MIB, "activ": 8 * GIB, "other": 50 * MIB},
            relaxations=(("12 devices", "peak 22.1 GiB"), ("precision=bf16", "peak 19.0 GiB")),
            useless=("more microbatches (already 1 row each)", "more recomputation (already all)"),
        ),
        """\
error[GA201]: no plan fits 8 x 24.0 GiB; the closest needs 26.3 GiB (2.3 GiB over, on stage 0)
  closest: data 1 x pipeline 8, 32 microbatches of 1, recompute all
           param 1.6 GiB · activ 8.0 GiB · other 50.0 MiB
  any one of these makes it fit:
    12 devices      peak 22.1 GiB
    precision=bf16  peak 19.0 GiB
  would not help: more microbatches (already 1 row each), more recomputation (already all)
  explain: graphaccel explain GA201""",
    ),
    (
        errors.BadPin(
            pin="data", value=3, reason="3 does not divide 8 devices", allowed=("1", "2", "4", "8")
        ),
        """\
error[GA202]: data=3 can not be planned
  why:  3 does not divide 8 devices
  help: use one of:  data=1  data=2  data=4  data=8
  explain: graphaccel explain GA202""",
    ),
    (
        errors.TooManyStages(
            asked=8, possible=3, location=errors.Location("model.py", 30, "    x = self.blocks(x)")
        ),
        """\
error[GA203]: the graph can not be cut into 8 stages; 3 is the most
  --> model.py:30
   30 |     x = self.blocks(x)
      |     ^^^^^^^^^^^^^^^^^^ the longest part that can not be cut
  why:  every stage needs at least one parameter and one op of its own
  help: use at most:  pipeline=3
  explain: graphaccel explain GA203""",
    ),
    (
        errors.PlanMismatch(
            path="plan.json",
            differences=(("batch", "64", "32"), ("devices", "8 x h100-80gb", "4 x cpu")),
        ),
        """\
error[GA204]: plan `plan.json` was made for something else
           plan           here
  batch    64             32
  devices  8 x h100-80gb  4 x cpu
  why:  its predictions and its stage cuts would not hold
  help: make a new one:  graphaccel plan FILE --devices N --json plan.json
  explain: graphaccel explain GA204""",
    ),
    (
        errors.TooManyDevices(
            asked=16, available=8, where="CUDA devices; CUDA_VISIBLE_DEVICES= uses the CPU"
        ),
        """\
error[GA205]: 16 devices asked for, 8 available (CUDA devices; CUDA_VISIBLE_DEVICES= uses the CPU)
  help: use what is here:  devices=8
  help: to plan for machines you do not have:  graphaccel plan FILE --devices 16 --device h100-80gb
  explain: graphaccel explain GA205""",
    ),
    (
        errors.BatchNotDivisible(batch=12, microbatches=4, data=2, allowed=(1, 2, 3, 6)),
        """\
error[GA206]: a batch of 12 can not be cut into 8 equal parts (4 microbatches x data 2)
  why:  microbatches of different sizes would change the loss
  help: with data=2 use microbatches= one of:  1, 2, 3, 6
  help: or leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  explain: graphaccel explain GA206""",
    ),
    (
        errors.BatchNotDivisible(
            batch=5, microbatches=1, data=2, allowed=(), reason="its buffer n depends on every row"
        ),
        """\
error[GA206]: a batch of 5 can not be cut into 2 equal parts (1 microbatches x data 2), and rows to complete it would change the result
  why:  its buffer n depends on every row
  help: leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  help: or use a batch that is a multiple of 2
  explain: graphaccel explain GA206""",
    ),
    (
        errors.BatchNotDivisible(
            batch=5,
            microbatches=1,
            data=2,
            allowed=(),
            reason="its loss has no input that marks a row as ignored",
            left_out_by="TrainingArguments(dataloader_drop_last=True)",
        ),
        """\
error[GA206]: the last batch of each epoch, 5 rows, can not be cut into 2 equal parts (1 microbatches x data 2), and rows to complete it would change the result
  why:  its loss has no input that marks a row as ignored
  help: leave a last, smaller batch out:  TrainingArguments(dataloader_drop_last=True)
  help: or use a batch that is a multiple of 2
  explain: graphaccel explain GA206""",
    ),
    (
        errors.SplitRefused(
            axis="microbatch",
            op="aten.batch_norm",
            module="layer1.0.bn1",
            location=errors.Location("resnet.py", 93, "        out = self.bn1(out)", 14, 27),
            reason="it normalises by the mean of all rows",
        ),
        """\
error[GA207]: the batch can not be split over the microbatch axis: aten.batch_norm in `layer1.0.bn1` needs the whole batch
  --> resnet.py:93
   93 |         out = self.bn1(out)
      |               ^^^^^^^^^^^^^
  why:  it normalises by the mean of all rows
  help: keep the batch whole on this axis:  microbatches=1
  explain: graphaccel explain GA207""",
    ),
    (
        errors.Unsupported(
            what="dtype torch.complex64 of parameter w",
            reason="gradients of complex numbers are not sent",
            help_line="convert it:  model.float()",
        ),
        """\
error[GA208]: dtype torch.complex64 of parameter w is not supported
  why:  gradients of complex numbers are not sent
  help: convert it:  model.float()
  explain: graphaccel explain GA208""",
    ),
    (
        errors.CannotExport(
            target="deepspeed",
            plan="data 2 x pipeline 2",
            reasons=("pipeline 2: it has none", "recomputation: it is not set there"),
        ),
        """\
error[GA209]: deepspeed can not run this plan: data 2 x pipeline 2
  pipeline 2: it has none
  recomputation: it is not set there
  why:  what is left out of a configuration would be decided otherwise there
  help: leave out what is pinned of these, or run the plan here:  graphaccel.optimize(model, plan="plan.json")
  explain: graphaccel explain GA209""",
    ),
    (
        errors.ConflictingPins(
            pins={"data": 2, "schedule": "gpipe"},
            devices=8,
            reason="it is so",
            instead={"data": (1, 4), "schedule": ()},
        ),
        """\
error[GA210]: data=2 and schedule='gpipe' can not be kept together on 8 devices
  data=2            with the others:  data=1  data=4
  schedule='gpipe'  leave it out
  why:  it is so
  help: leave one of them out, and it will be chosen for you:  data, schedule
  explain: graphaccel explain GA210""",
    ),
    (
        errors.NotElementwise(
            optimizer="Prodigy", reason="its step of one parameter depends on others", own=True
        ),
        """\
error[GA211]: Prodigy does not work on parameters that are spread over devices
  why:  the step must be that of one device, and its step of one parameter depends on others
  help: keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1
  help: if it treats every number by itself:  Prodigy.graphaccel_elementwise = True
  explain: graphaccel explain GA211""",
    ),
    (
        errors.NotElementwise(
            optimizer="Lookahead", reason="it steps another optimizer", inner="base_optimizer"
        ),
        """\
error[GA211]: Lookahead does not work on parameters that are spread over devices
  why:  the step must be that of one device, and it steps another optimizer
  help: keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1
  help: or optimize the other one, and step this one around it:  graphaccel.optimize(model, optimizer.base_optimizer)
  explain: graphaccel explain GA211""",
    ),
    (
        errors.NotElementwise(optimizer="LBFGS", reason="its step computes the loss anew"),
        """\
error[GA211]: LBFGS does not work on parameters that are spread over devices
  why:  the step must be that of one device, and its step computes the loss anew
  help: keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1
  explain: graphaccel explain GA211""",
    ),
    (
        errors.CannotInitialise(model="GPT", reason="it was built elsewhere"),
        """\
error[GA212]: the initial weights of `GPT` are not known
  why:  it was built elsewhere
  help: say how it is built:  graphaccel.optimize(model, optimizer, init_fn=lambda: GPT(...))
  help: or build it so:  model = graphaccel.deferred(lambda: GPT(...))
  explain: graphaccel explain GA212""",
    ),
    (
        errors.ScheduleRefused(
            schedule="1f1b",
            op="aten.sqrt.default",
            module="loss",
            location=errors.Location("train.py", 7, "    return mse.sqrt()", 11, 21),
            reason="it needs a sum over the whole batch at once",
        ),
        """\
error[GA213]: schedule='1f1b' starts backwards before the last forward, and aten.sqrt.default in `loss` needs all microbatches at once
  --> train.py:7
    7 |     return mse.sqrt()
      |            ^^^^^^^^^^
  why:  it needs a sum over the whole batch at once
  help: run all forwards first:  schedule='gpipe'
  help: or keep the batch whole:  microbatches=1
  explain: graphaccel explain GA213""",
    ),
    (
        errors.MissingRule(
            ops=(
                ("mylib.scan", "bf16[64,512]", "layers.0.ssm", "mamba.py:140", 32),
                ("aten.im2col", "f32[64,3,8,8]", "patch", "vit.py:31", 1),
            ),
            form='"mylib::scan", "n a -> n a", whole="a", example=(torch.randn(64, 512),)',
        ),
        """\
error[GA301]: 2 ops have no sharding rule
  mylib.scan   bf16[64,512]   layers.0.ssm  mamba.py:140  32 uses
  aten.im2col  f32[64,3,8,8]  patch         vit.py:31     1 use
  why:  without a rule it is not known whether the batch may be split there
  help: say how it may be split, if so:  graphaccel.sharding_rule("mylib::scan", "n a -> n a", whole="a", example=(torch.randn(64, 512),))
  help: keep the batch whole:  data=1, microbatches=1
  explain: graphaccel explain GA301""",
    ),
    (
        errors.RuleWrong(
            op="mylib.scan.default",
            rule="n d -> n d",
            reason="sharding `d` changes result 0",
        ),
        """\
error[GA302]: the sharding rule of mylib.scan.default does not hold: 'n d -> n d'
  why:  run whole and by shards on the example, sharding `d` changes result 0
  help: name dims that can not be split:  whole='d'
  explain: graphaccel explain GA302""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text


def test_a_batch_that_no_op_forbids_to_split() -> None:
    error = errors.SplitRefused(axis="data", op="", module="", reason="it has one size")
    assert str(error) == (
        "error[GA207]: the batch can not be split over the data axis: it has one size\n"
        "  help: keep the batch whole on this axis:  data=1\n"
        "  explain: graphaccel explain GA207"
    )
