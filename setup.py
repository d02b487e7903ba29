"""Computes kvd's requirements: the sibling tablespace in a checkout, a version pin elsewhere."""

from pathlib import Path

from setuptools import setup

VERSION = "0.1.0"
sibling = Path(__file__).resolve().parent / "tablespace"
in_checkout = (sibling / "pyproject.toml").is_file()
engine = f"tablespace @ {sibling.as_uri()}" if in_checkout else f"tablespace=={VERSION}"

setup(
    install_requires=[
        engine,
        "msgspec>=0.19",
        "numpy>=1.24",
        "prometheus_client>=0.20",
        "rich>=13",
        "tomli>=2; python_version < '3.11'",
    ]
)
