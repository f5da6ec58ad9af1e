"""The full text of every error about running, and the device catalogue."""

from __future__ import annotations

import pytest

from graphaccel import errors

GIB = 2**30
MIB = 2**20

CASES = [
    (
        errors.HookNotKept(
            module="layers.3",
            kind="forward hook",
            location=errors.Location("train.py", 40, "model.layers[3].register_forward_hook(show)"),
        ),
        """\
error[GA401]: the forward hook on `layers.3` can not be kept
  --> train.py:40
   40 | model.layers[3].register_forward_hook(show)
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why:  the step runs as one graph, in which modules are not called any more
  help: remove it before optimize():  handle.remove()
  help: or return what it reads from the model's forward
  explain: graphaccel explain GA401""",
    ),
    (
        errors.RetainGraph(),
        """\
error[GA402]: the loss can be differentiated only once, to first order
  why:  forward and backward ran together when the model was called; nothing is kept for a second backward
  help: add losses before backward:  (loss_a + loss_b).backward()
  help: or call the model again for the second backward
  explain: graphaccel explain GA402""",
    ),
    (
        errors.NeedsLauncher(devices=8, command="graphaccel run --devices 8 train.py"),
        """\
error[GA403]: devices=8 needs 8 processes, and this one can not be restarted (notebook, interactive or piped Python)
  why:  every device is driven by a process of its own that runs the same script
  help: save the script to a file and start it so:  graphaccel run --devices 8 train.py
  explain: graphaccel explain GA403""",
    ),
    (
        errors.BatchesDiffer(step=3, ranks=(1, 3)),
        """\
error[GA404]: at step 3 the batch of rank 1, 3 differs from rank 0's
  why:  every rank is given the global batch and takes its own part of it
  help: seed the shuffling alike on every rank:  torch.manual_seed(0)
  help: and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., shuffle=True)
  help: or keep the sampler, and say that each rank reads its own rows:  optimize(..., batch="local")
  explain: graphaccel explain GA404""",
    ),
    (
        errors.OutputDropped(name="logits"),
        """\
error[GA405]: output `logits` is not kept in training by this plan
  why:  microbatches and stages would have to keep and send it; only the loss is
  help: keep it:  graphaccel.optimize(model, optimizer, outputs='all')
  help: or compute it under torch.no_grad()
  help: or, if the script computes its loss from it:  graphaccel.optimize(model, optimizer, loss_fn='outside')
  explain: graphaccel explain GA405""",
    ),
    (
        errors.BatchChanged(what="dtype of tokens", expected="torch.int64", got="torch.float32"),
        """\
error[GA406]: dtype of tokens changed: captured with torch.int64, now torch.float32
  why:  the graph and the plan hold for batches like the captured one only
  help: convert it before the call:  x = x.to(torch.int64)
  explain: graphaccel explain GA406""",
    ),
    (
        errors.GraphMisuse(
            what="devices=8, but the launcher started 4 processes",
            help_line="leave devices out, or start 8:  graphaccel run --devices 8 train.py",
        ),
        """\
error[GA407]: devices=8, but the launcher started 4 processes
  help: leave devices out, or start 8:  graphaccel run --devices 8 train.py
  explain: graphaccel explain GA407""",
    ),
    (
        errors.ElsewhereNeeded(
            op="lerp", location=errors.Location("train.py", 12, "ema.update_parameters(model)")
        ),
        """\
error[GA408]: `lerp` needs the values of a parameter that is on another pipeline rank
  --> train.py:12
   12 | ema.update_parameters(model)
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why:  a process holds the stages that it runs, and the others hold the rest
  help: bring all of them here first:  state = graphaccel.full_state_dict(model)
  help: or make averages and copies of the model when it has its plan:  graphaccel.optimize(model, optimizer, example_batch=batch)
  explain: graphaccel explain GA408""",
    ),
    (
        errors.ElsewhereNeeded(op="equal"),
        """\
error[GA408]: `equal` needs the values of a parameter that is on another pipeline rank
  why:  a process holds the stages that it runs, and the others hold the rest
  help: whether both are one parameter does not depend on values:  one is other
  help: to give an optimizer what it does not have yet:  optimizer.add_param_group({'params': list(layer.parameters())})
  explain: graphaccel explain GA408""",
    ),
    (
        errors.ElsewhereNeeded(op="cat", optimizer="LBFGS"),
        """\
error[GA408]: `LBFGS.step` needs the values of a parameter that is on another pipeline rank
  why:  a process holds the stages that it runs, and the others hold the rest; LBFGS computes with all parameters at once
  help: train with one that updates each by itself:  optimizer = torch.optim.AdamW(model.parameters())
  help: or give each process the whole model:  graphaccel.optimize(model, optimizer, pipeline=1)
  explain: graphaccel explain GA408""",
    ),
    (
        errors.NotAlone(
            variable="SLURM_NTASKS=8",
            reason="srun did not start this process as one of them",
            command="srun python train.py",
        ),
        """\
error[GA409]: SLURM_NTASKS=8 says that this job has several processes, and srun did not start this process as one of them
  why:  each of them would train a model of its own
  help: start them so:  srun python train.py
  help: or train in this process alone:  graphaccel.optimize(model, optimizer, devices=1)
  explain: graphaccel explain GA409""",
    ),
    (
        errors.NoMeeting(
            place="node0:29500",
            cause="Connection refused, for 300 s",
            command="graphaccel run --devices 1 --nnodes 2 --node-rank 1 "
            "--rdzv-endpoint FIRST_MACHINE:29500 train.py",
        ),
        """\
error[GA419]: the processes of this job can not meet at node0:29500: Connection refused, for 300 s
  why:  before training starts every process connects to a port of the first machine
  help: name a machine that all of them reach, and a port that is free on it:  graphaccel run --devices 1 --nnodes 2 --node-rank 1 --rdzv-endpoint FIRST_MACHINE:29500 train.py
  explain: graphaccel explain GA419""",
    ),
    (
        errors.WrappedModel(
            what="the optimized model is inside DistributedDataParallel",
            why="graphaccel splits the step over devices and sums the gradients itself",
            help_line="leave the wrapper out, and call the model that optimize() returned",
        ),
        """\
error[GA410]: the optimized model is inside DistributedDataParallel
  why:  graphaccel splits the step over devices and sums the gradients itself
  help: leave the wrapper out, and call the model that optimize() returned
  explain: graphaccel explain GA410""",
    ),
    (
        errors.PartOfModel(what="`GPT`"),
        """\
error[GA411]: `GPT` can not be saved by one process: others have parts of it
  why:  under this plan each process has some of the numbers only, and a file of those would load as another model
  help: have the whole, on every process:  state = graphaccel.full_state_dict(model)
  help: and write it on one of them:  torch.save(state, 'model.pt')
  help: or, of transformers:  model.save_pretrained('folder', state_dict=state)
  help: or each process its part:  graphaccel.save('checkpoints', model, optimizer, step=100)
  help: to read a file of the whole model:  graphaccel.load('model.safetensors', model)
  explain: graphaccel explain GA411""",
    ),
    (
        errors.PartOfModel(what="this optimizer's state dict", of_optimizer=True),
        """\
error[GA411]: this optimizer's state dict can not be saved by one process: others have parts of it
  why:  under this plan each process has some of the numbers only, and a file of those would load as another state
  help: save it with the model, each process its part:  graphaccel.save('checkpoints', model, optimizer, step=100)
  help: which any plan reads:  graphaccel.load('checkpoints', model, optimizer)
  help: or keep all of it on each process:  graphaccel.optimize(model, optimizer, zero=0, tensor=1, pipeline=1)
  explain: graphaccel explain GA411""",
    ),
    (
        errors.PartOfModel(what="this optimizer's state dict", of_optimizer=True, loaded=True),
        """\
error[GA411]: this optimizer's state dict can not be loaded by one process: others have parts of it
  why:  under this plan each process has some of the numbers only, and the rest would start anew
  help: save it with the model, each process its part:  graphaccel.save('checkpoints', model, optimizer, step=100)
  help: which any plan reads:  graphaccel.load('checkpoints', model, optimizer)
  help: or keep all of it on each process:  graphaccel.optimize(model, optimizer, zero=0, tensor=1, pipeline=1)
  explain: graphaccel explain GA411""",
    ),
    (
        errors.RankLost(
            rank=0,
            stage=0,
            lost="rank 1 (stage 1)",
            last_action="forward of microbatch 3",
            waiting_for="gradients of microbatch 0",
            cause="connection closed by peer",
        ),
        """\
error[GA501]: rank 0 (stage 0) lost rank 1 (stage 1)
  last action done:  forward of microbatch 3
  waiting for:       gradients of microbatch 0
  reported:          connection closed by peer
  why:  a process died, or did not answer within the timeout
  help: the first error in the log of the lost rank is the cause; read that one first
  help: or, if it has none, its script ended, or went on: save, load and export, and read parameters and gradients, on every rank, not below `if rank == 0`
  explain: graphaccel explain GA501""",
    ),
    (
        errors.DeviceOutOfMemory(
            stage=1,
            action="backward of microbatch 2",
            predicted={"activ": 31 * GIB, "other": 2 * GIB},
            actual={"activ": 31 * GIB, "other": 9 * GIB, "temp": 5 * MIB},
            owner="layers.14.mlp",
        ),
        """\
error[GA502]: stage 1 ran out of memory during backward of microbatch 2
         predicted  actual
  activ  31.0 GiB   31.0 GiB
  other  2.0 GiB    9.0 GiB
  temp   -          5.0 MiB
  largest live tensors belong to: layers.14.mlp
  help: pin what saves most:  graphaccel.optimize(model, optimizer, recompute='all')
  help: or plan for less than the device has:  graphaccel plan FILE --devices N --memory SIZE --json plan.json
  explain: graphaccel explain GA502""",
    ),
    (
        errors.DeviceOutOfMemory(
            stage=0,
            action="forward of microbatch 0",
            predicted={"tensors": 31 * GIB},
            actual={"free": 5 * MIB},
            pins={"data": 2, "recompute": "all"},
            smaller=(21 * GIB, 31 * GIB),
        ),
        """\
error[GA502]: stage 0 ran out of memory during forward of microbatch 0
           predicted  actual
  tensors  31.0 GiB   -
  free     -          5.0 MiB
  help: predicted to need 21.0 GiB in tensors on its fullest rank, this plan 31.0 GiB:  graphaccel.optimize(model, optimizer, data=2, recompute='all')
  help: or plan for less than the device has:  graphaccel plan FILE --devices N --memory SIZE --json plan.json
  explain: graphaccel explain GA502""",
    ),
    (
        errors.UnknownDevice(name="h100", closest=("h100-80gb", "h200-141gb")),
        """\
error[GA601]: no device named `h100` in the catalogue
  help: did you mean:  --device h100-80gb
  help: did you mean:  --device h200-141gb
  explain: graphaccel explain GA601""",
    ),
    (
        errors.BadCluster(where="c.json", problems=("links is missing", "count is 0: above 0")),
        """\
error[GA602]: c.json describes no cluster
  links is missing
  count is 0: above 0
  why:  times and memory are predicted from these figures
  help: start from a known device:  graphaccel plan FILE --devices N --device h100-80gb --save-cluster cluster.json
  explain: graphaccel explain GA602""",
    ),
    (
        errors.BadFusion(
            name="halved",
            reason="it would change dtype torch.bfloat16 to torch.float32 (output `y`)",
            location=errors.Location("halved.py", 4, "class halved:"),
        ),
        """\
error[GA701]: the fusion `halved` is refused: it would change dtype torch.bfloat16 to torch.float32 (output `y`)
  --> halved.py:4
    4 | class halved:
      | ^^^^^^^^^^^^^
  help: a fusion that works, to start from:  graphaccel fusion new NAME
  explain: graphaccel explain GA701""",
    ),
    (
        errors.KernelFailed(
            name="halved",
            op="halved_backward",
            arguments=("8x128 bfloat16", "1e-06"),
            cause="OutOfResources: out of resource: shared memory",
        ),
        """\
error[GA702]: the fused op `halved_backward` failed
  called with: 8x128 bfloat16, 1e-06
  OutOfResources: out of resource: shared memory
  help: without this fusion:  graphaccel.optimize(model, optimizer, fusions=("auto", "-halved"))
  help: its checks on this machine:  graphaccel fusion check halved
  explain: graphaccel explain GA702""",
    ),
    (
        errors.UnknownFusion(
            name="rmsnorm", known=("add_rms_norm", "rms_norm"), closest=("rms_norm",)
        ),
        """\
error[GA703]: no fusion named `rmsnorm`
  there are: add_rms_norm, rms_norm
  help: did you mean:  rms_norm
  explain: graphaccel explain GA703""",
    ),
    (
        errors.BadFusionPackage(
            package="fast-ops",
            version="1.2",
            point="gelu = fast_ops.gelu",
            cause="ModuleNotFoundError: No module named 'cutlass'",
        ),
        """\
error[GA704]: the fusions of the installed package `fast-ops` 1.2 can not be loaded
  entry point:  gelu = fast_ops.gelu  [graphaccel.fusions]
  raised:       ModuleNotFoundError: No module named 'cutlass'
  why:  every installed package that offers fusions is imported before one is chosen
  help: mend it:  pip install --upgrade --force-reinstall fast-ops
  help: or do without it:  pip uninstall fast-ops
  help: or place no fusions:  graphaccel.optimize(model, optimizer, fusions="off")
  explain: graphaccel explain GA704""",
    ),
    (
        errors.BadFuel(value="many", sites=9),
        """\
error[GA705]: GRAPHACCEL_FUEL=many is no number of fusions
  why:  it is how many are placed, the first ones in graph order: 0 or more; this graph has 9 places
  help: the first half of them:  export GRAPHACCEL_FUEL=4
  help: all of them:  unset GRAPHACCEL_FUEL
  explain: graphaccel explain GA705""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text
