"""Small data in the formats that third-party scripts read, generated only with torch and its dependencies."""

import gzip
import json
import struct
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path
from random import Random

CLASSES = 8  # the scripts report top-5 accuracy


def write_image_folder(folder: Path, *, size: int = 40, each: int = 24, validation: str = "val") -> None:
    """Write train/<class>/<n>.png and a quarter as many for validation: noise around one colour per class."""
    from PIL import Image

    draw = Random(0)
    for part, number in (("train", each), (validation, each // 4)):
        for kind in range(CLASSES):
            place = folder / part / f"class_{kind}"
            place.mkdir(parents=True, exist_ok=True)
            for index in range(number):
                pixels = bytes(
                    (draw.randrange(128) + 60 * (kind == band)) % 256 for _ in range(size * size) for band in range(3)
                )
                Image.frombytes("RGB", (size, size), pixels).save(place / f"{index:03d}.png")


def read_source_text(characters: int) -> str:
    """Return text: the beginning of Python's standard library, file after file."""
    result: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        result.append(path.read_text(errors="ignore"))
        if sum(map(len, result)) >= characters:
            break
    return "".join(result)[:characters]


def write_tokens(folder: Path) -> None:
    """Write train.bin and val.bin, codes of characters as 16-bit integers, without meta.pkl (nanoGPT)."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = array("H", (min(ord(letter), 127) for letter in read_source_text(100_000)))
    (folder / "train.bin").write_bytes(numbers[:90_000].tobytes())
    (folder / "val.bin").write_bytes(numbers[90_000:].tobytes())


def write_language_model(folder: Path, python: str) -> None:
    """Write text.txt, a tokenizer of its letters and the configuration of a small GPT-2, for Hugging Face's examples."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(read_source_text(60_000))
    program = (
        "import sys; from tokenizers import Tokenizer, models, pre_tokenizers, decoders\n"
        "from transformers import GPT2Config, PreTrainedTokenizerFast\n"
        "t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))\n"
        "t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); t.decoder = decoders.ByteLevel()\n"
        "PreTrainedTokenizerFast(tokenizer_object=t).save_pretrained(sys.argv[1])\n"
        "GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)"
        ".save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([python, "-c", program, str(folder)], check=True, stdout=sys.stderr)


def write_digits(folder: Path, *, train: int = 512, test: int = 128) -> None:
    """Write MNIST's four files with noise instead of digits, in torchvision's layout (MNIST/raw)."""
    place = folder / "MNIST" / "raw"
    place.mkdir(parents=True, exist_ok=True)
    draw = Random(0)
    for part, number in (("train", train), ("t10k", test)):
        images = struct.pack(">IIII", 0x803, number, 28, 28) + draw.randbytes(number * 28 * 28)
        labels = struct.pack(">II", 0x801, number) + bytes(draw.randrange(10) for _ in range(number))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            (place / f"{part}-{kind}-ubyte").write_bytes(content)
            (place / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def write_json(path: Path, content: object) -> None:
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
