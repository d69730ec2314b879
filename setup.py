"""Package metadata. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

PLOT = ["matplotlib>=3.7"]
TOOLS = [
    "pytest>=8.4",
    "hypothesis>=6.100",
    "ruff>=0.9",
    "pyright[nodejs]>=1.1.390",
    "playwright>=1.50",
]
HF = [
    "transformers>=4.56",
    "tokenizers>=0.22",
    "jinja2>=3.1.6",
    "peft>=0.14",
    "accelerate>=1.10",
]
# The tests also use what it does not promise to keep, so not any later version will do.
TYPES = ["spmd_types>=0.3.1,<0.4"]
SITE = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]
PARQUET = ["pyarrow>=15"]
INT8 = ["bitsandbytes>=0.50"]
REPORT = ["plotly>=6.0"]
# The services of log.to: an extra of the name of each.
TENSORBOARD = ["tensorboard>=2.18"]
# The other two bring fifteen packages and thirty: tested against a contract where they are not.
WANDB = ["wandb>=0.22"]
MLFLOW = ["mlflow-skinny>=3.4"]
# Brings thirty packages, datasets among them: its tests are skipped where it is not installed.
LM_EVAL = ["lm-eval>=0.4.9"]
SHOWN = [*REPORT, *TENSORBOARD]
DEV = [*TOOLS, *PLOT, *HF, *TYPES, *SITE, *PARQUET, *INT8, *SHOWN, "scikit-learn>=1.4"]

setup(
    name="torchdistpackage",
    version="0.1.0",
    description="Mixed-parallelism training for Slurm users, from one YAML file",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["torchdistpackage", "torchdistpackage.*"]),
    package_data={
        "torchdistpackage": [
            "py.typed",
            "families/written.json",
            "report/page.css",
            "report/page.js",
        ]
    },
    python_requires=">=3.11",
    # A range, so that a cluster's own build of torch stays where it is.
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "pyyaml>=6",
        "pydantic>=2.7",
        "typer>=0.19",
        "rich>=13",
        "safetensors>=0.4.5",
        "xxhash>=3.4",
        "submitit>=1.5",
        "cloudpickle>=2.2",
    ],
    extras_require={
        "plot": PLOT,
        "hf": HF,
        "parquet": PARQUET,
        "int8": INT8,
        "report": REPORT,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "lm-eval": LM_EVAL,
        "site": SITE,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["tdp=torchdistpackage.cli.main:main"]},
)
