"""The full text of every error about a run's whole life: checkpoints, losses that are not
finite."""

from __future__ import annotations

import pytest

from graphaccel import errors

CASES = [
    (
        errors.CheckpointNotSaved(
            what="the checkpoint of step 200",
            folder="checkpoints",
            rank=3,
            cause="No space left on device",
            call="graphaccel.save('checkpoints', model, optimizer, step=200)",
            newest="checkpoints/step-00000100",
        ),
        """\
error[GA412]: the checkpoint of step 200 could not be saved in `checkpoints`
  rank 3: No space left on device
  newest complete checkpoint: checkpoints/step-00000100
  why:  it counts only when every rank has written its part of it
  help: make room, or save it where there is some:  graphaccel.save('checkpoints', model, optimizer, step=200)
  explain: graphaccel explain GA412""",
    ),
    (
        errors.CheckpointDamaged(
            path="checkpoints/step-00000200",
            problems=("__1_0.distcp is missing",),
            before="checkpoints/step-00000100",
        ),
        """\
error[GA413]: `checkpoints/step-00000200` can not be loaded
  __1_0.distcp is missing
  why:  a file is missing, was cut off or changed after it was written, or is of another format
  help: load the one before it:  graphaccel.load('checkpoints/step-00000100', model, optimizer)
  explain: graphaccel explain GA413""",
    ),
    (
        errors.CheckpointDiffers(
            path="checkpoints/step-00000200",
            missing=("model.head.bias float32[10]",),
            unexpected=tuple(f"model.blocks.{i}.weight float32[8, 8]" for i in range(12)),
            changed=("model.out.weight float32[8, 4], here float32[8, 5]",),
        ),
        """\
error[GA414]: `checkpoints/step-00000200` does not fit this model or optimizer
  not in the checkpoint:
    model.head.bias float32[10]
  only in the checkpoint:
"""
        + "".join(f"    model.blocks.{i}.weight float32[8, 8]\n" for i in range(10))
        + """\
    and 2 more
  different in the checkpoint:
    model.out.weight float32[8, 4], here float32[8, 5]
  why:  a part of it would silently keep the values that it has now
  help: build the model and the optimizer as they were when it was saved; its manifest.json lists every tensor
  explain: graphaccel explain GA414""",
    ),
    (
        errors.CheckpointUntrusted(path="model.pt", named="posix.system"),
        """\
error[GA415]: `model.pt` holds more than weights: it names `posix.system`
  why:  a pickle runs what it names when it is read, so only tensors and plain values are read; nothing was run
  help: if you trust its source, write the weights alone:  torch.save(torch.load('model.pt', weights_only=False).state_dict(), 'weights.pt')
  explain: graphaccel explain GA415""",
    ),
    (
        errors.NonFiniteLoss(step=12, loss="nan"),
        """\
error[GA416]: the loss of training step 12 is nan
  why:  an update by its gradients would make weights NaN; nothing was updated
  help: go on without such steps:  graphaccel.optimize(model, optimizer, on_nonfinite='skip')
  explain: graphaccel explain GA416""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=[error.code for error, _ in CASES])
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text
