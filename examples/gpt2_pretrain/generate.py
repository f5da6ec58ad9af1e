"""Generate text with a trained causal language model: from nothing, from a file, or in a dialogue.

    python examples/gpt2_pretrain/generate.py --model gpt2/model --num-samples 2
    python examples/gpt2_pretrain/generate.py --model gpt2/model --sample-input-file prompts.txt
    python examples/gpt2_pretrain/generate.py --model gpt2/model --interactive

The model is a folder for `from_pretrained`, as `graphaccel train` writes it; nothing here needs
graphaccel. In a dialogue "stop" ends it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text with a trained model.")
    add = parser.add_argument
    add("--model", required=True, help="a folder with a model and its tokenizer")
    add("--sample-input-file", type=Path, help="a prompt a line, which is continued")
    add("--interactive", action="store_true", help="ask for prompts; `stop` ends it")
    add("--genfile", type=Path, help="write JSON lines here; else text is printed")
    add("--num-samples", type=int, default=1, help="texts for each prompt, or from nothing")
    add("--out-seq-length", type=int, default=64, help="new tokens at most")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    add("--top-p", type=float, default=0.9, help="least share of probability to draw from; 1: all")
    add("--top-k", type=int, default=0, help="likeliest tokens to draw from; 0: all")
    add("--no-cache", action="store_true", help="compute keys and values of all tokens each time")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.interactive and options.sample_input_file:
        parser.error("--interactive asks for prompts: leave --sample-input-file out")
    if options.sample_input_file and not options.sample_input_file.is_file():
        parser.error(f"there is no file {options.sample_input_file}")
    if not 0 < options.top_p <= 1 or options.temperature < 0:
        parser.error("--top-p is in (0, 1], --temperature at least 0")
    if min(options.num_samples, options.out_seq_length) < 1 or options.top_k < 0:
        parser.error("--num-samples and --out-seq-length are at least 1, --top-k at least 0")
    if not Path(options.model).is_dir():
        parser.error(f"there is no folder {options.model}")
    check_genfile(parser, options)
    return options


def check_genfile(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    file, prompts = options.genfile, options.sample_input_file
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        parser.error(f"--genfile {file} is a folder, or in none")
    if prompts and file.resolve() == prompts.resolve():
        parser.error("--genfile would write over the prompts of --sample-input-file")


class Generator:
    """Continues prompts. A prompt that leaves no room for new tokens loses its beginning."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(options.model)
        self.model = model.eval().to(device)
        longest = getattr(model.config, "max_position_embeddings", None)
        self.positions = longest or sys.maxsize
        start = self.tokenizer.bos_token_id
        self.start = self.tokenizer.eos_token_id if start is None else start
        if self.start is None:  # a document begins behind the end of another one
            self.start = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")

    @torch.no_grad()
    def __call__(self, prompt: str) -> list[str]:
        """What follows the prompt, `num_samples` times."""
        options = self.options
        ids = self.tokenizer(prompt).input_ids or [self.start]
        new = min(options.out_seq_length, self.positions - 1)
        ids = ids[-(self.positions - new) :]
        given = torch.tensor([ids], device=self.model.device)
        drawn = {}
        if options.temperature > 0:
            drawn = {
                "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k
            }  # fmt: skip
        results = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            num_return_sequences=options.num_samples if drawn else 1,
            do_sample=bool(drawn),
            use_cache=not options.no_cache,
            eos_token_id=self.start,
            pad_token_id=self.start,
            **drawn,
        )
        texts = [self.tokenizer.decode(r[len(ids) :], skip_special_tokens=True) for r in results]
        return texts * (options.num_samples // len(texts))


def prompts(options: argparse.Namespace) -> Iterator[str]:
    """What to continue: lines of the file or of the dialogue, else nothing once."""
    if options.interactive:
        while True:
            try:
                prompt = input("\nprompt (stop ends): ")
            except EOFError:
                return
            if prompt.strip() == "stop":
                return
            yield prompt
    elif options.sample_input_file:
        yield from options.sample_input_file.read_text(encoding="utf-8").splitlines()
    else:
        yield ""


def main() -> None:
    options = arguments()
    set_seed(options.seed)
    generate = Generator(options)
    if options.genfile:
        options.genfile.write_text("")
    for prompt in prompts(options):
        for text in generate(prompt):
            if options.genfile:
                with options.genfile.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"prompt": prompt, "text": text}) + "\n")
            else:
                print(f"{prompt}{text}\n", flush=True)


if __name__ == "__main__":
    main()
