# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from typing import Any, NoReturn
class FileSystemWriterAsync:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
