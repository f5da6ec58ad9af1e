"""The step of full.yaml without weights, for `graphaccel plan`: no device of it need be here."""

from pathlib import Path

import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 50_257


def job() -> tuple:
    settings = yaml.safe_load(Path(__file__).with_name("full.yaml").read_text())
    config = GPT2Config(vocab_size=VOCABULARY, use_cache=False, **settings["model_settings"])
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(settings["global_batch"], settings["length"], dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, None, torch.optim.AdamW(model.parameters())
