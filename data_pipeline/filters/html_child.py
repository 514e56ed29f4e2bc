"""Extracts the text of HTML pages in a separate process, which `html` starts and which a page beyond the limits ends.

Requests come on standard input, answers go to standard output. All numbers are little-endian and have 64 bits:

    M or A, length, bytes of memory, seconds, the page     request: M the main content (everything if there is none), A everything
    m or a, length, the text                               answer: m the main content, a everything
    E, 0                                                   answer if the page needs more memory; the process ends
"""

from __future__ import annotations

import os
import resource
import struct

from resiliparse.extract.html2text import extract_plain_text

from common.child_process import SoftLimit, forbid_files, memory_in_use


def main() -> None:
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    forbid_files()
    memory, processor_time = SoftLimit(resource.RLIMIT_AS), SoftLimit(resource.RLIMIT_CPU)
    in_use = memory_in_use()
    while header := source.read(25):
        mode, length, memory_bytes, seconds = struct.unpack("<cqqq", header)
        if in_use is not None:
            memory.set(in_use + memory_bytes)
        processor_time.set_seconds(seconds)
        try:
            letter, text = _extract(source.read(length), mode)
        except Exception:  # memory ran out, for which the parser raises several types
            letter, text = b"E", b""
        finally:
            memory.set()  # the rest needs little memory, and must not fail
        sink.write(struct.pack("<cq", letter, len(text)))
        sink.write(text)
        sink.flush()
        if letter == b"E":
            return


def _extract(page: bytes, mode: bytes) -> tuple[bytes, bytes]:
    text = page.decode("utf-8", "surrogatepass")
    if mode == b"M" and (found := extract_plain_text(text, main_content=True, alt_texts=False)).strip():
        return b"m", found.encode("utf-8", "surrogatepass")
    return b"a", extract_plain_text(text, main_content=False, alt_texts=False).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
