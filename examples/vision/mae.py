"""Pretrain a masked autoencoder (MAE) on pictures without labels, with Hugging Face's Trainer.

    python examples/vision/mae.py --data pictures.npz
    graphaccel run --devices 2 examples/vision/mae.py --data pictures.npz
    graphaccel run --devices 8 examples/vision/mae.py --data pictures.npz --full

`images` of the file are [count, high, wide(, channels)] uint8. `--full` is ViT-L at 224 x 224.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import TrainingArguments, ViTMAEConfig, ViTMAEForPreTraining

from graphaccel.integrations.transformers import Trainer

parser = argparse.ArgumentParser(description="Pretrain a masked autoencoder.")
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--folder", type=Path, default=Path("mae"))
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=16, help="pictures in a step, over all devices")
parser.add_argument("--full", action="store_true", help="ViT-L")
options = parser.parse_args()

images = torch.from_numpy(np.load(options.data)["images"]).float() / 127.5 - 1
if images.dim() == 3:
    images = images[..., None]
images = images.permute(0, 3, 1, 2)
shape = {"image_size": images.shape[-1], "num_channels": images.shape[1]}
if options.full:
    config = ViTMAEConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        **shape,
    )  # fmt: skip
else:
    config = ViTMAEConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, patch_size=4, **shape,
    )  # fmt: skip
torch.manual_seed(0)
trainer = Trainer(
    model=ViTMAEForPreTraining(config),
    args=TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=1.5e-3,
        warmup_steps=options.steps // 10,
        logging_steps=max(1, options.steps // 6),
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=[{"pixel_values": image} for image in images],
)
trainer.train()
trainer.save_model(str(options.folder / "model"))
