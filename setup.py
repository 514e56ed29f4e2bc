"""Adds the recipes and the locks of `env/` to the wheel, as `common/env`; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["common*", "data_pipeline*", "trainer*"]), "common.env", "common.env.recipes"],
    package_dir={"common.env": "env", "common.env.recipes": "env/recipes"},
    package_data={
        "": ["*.css", "*.js", "*.jinja"],
        "common.env": ["requirements*.lock", "versions.env", "host.env"],
        "common.env.recipes": ["*.toml"],
    },
)
