"""Fine-tune a Llama with LoRA: the base is frozen, adapters are trained and saved alone.

    python examples/llama_lora/train.py
    graphaccel run --devices 2 --zero 3 examples/llama_lora/train.py
    graphaccel run --devices 8 examples/llama_lora/train.py --base llama --data text.jsonl

Without a base it is a small Llama with random weights and a token for each byte.
"""

import argparse
import json
from pathlib import Path
from pydoc_data import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import graphaccel

parser = argparse.ArgumentParser(description="Fine-tune a Llama with LoRA.")
parser.add_argument("--base", help="a folder with a model and its tokenizer")
parser.add_argument("--data", type=Path, help='JSON lines {"text": ...} (default: Python\'s help)')
parser.add_argument("--folder", type=Path, default=Path("adapters"))
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--batch", type=int, default=8, help="rows in a step, over all devices")
parser.add_argument("--length", type=int, default=64, help="tokens in a row")
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()


def tokens() -> torch.Tensor:
    """The texts, one after the other, as tokens."""
    if options.data is None:
        texts = list(topics.topics.values())
    else:
        texts = [json.loads(line)["text"] for line in options.data.read_text().splitlines()]
    if options.base is None:
        return torch.frombuffer(bytearray("".join(texts), "utf-8"), dtype=torch.uint8).long()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    return torch.tensor([i for text in texts for i in tokenizer(text).input_ids])


def base() -> torch.nn.Module:
    if options.base is not None:
        return AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))


torch.manual_seed(0)
lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(base(), lora)
model.print_trainable_parameters()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
model, optimizer = graphaccel.optimize(model, optimizer)

data = tokens()
generator = torch.Generator().manual_seed(0)
for step in range(options.steps):
    starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator)
    rows = torch.stack([data[start : start + options.length] for start in starts.tolist()])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    if step == 0:  # before the gradients are freed
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
memory = model.graphaccel.plan.prediction.memory[0]
print(f"gradients        {gradients:,} bytes of {sum(p.nbytes for p in trained):,} trained")
state = sum(tensor.nbytes for tensor in moments)
print(f"optimizer state  {state:,} bytes measured, {memory.optimizer:,} predicted")
weights = graphaccel.full_state_dict(model)
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    model.save_pretrained(options.folder, state_dict=weights)
    print(f"the adapters are in {options.folder}")
