"""The one part that pyproject.toml can't say yet: the compiled core is optional. Without a C compiler installation goes on."""

from setuptools import Extension, setup

HEADERS = ["_core_hash.h", "_core_table.h", "_core_rows.h", "_core_holders.h", "_core_match.h", "_core_choice.h"]

setup(
    ext_modules=[
        Extension(
            "rankway._core",
            ["src/rankway/_core.c"],
            depends=[f"src/rankway/{header}" for header in HEADERS],
            # Contracted multiply-adds would round costs differently from the pure twin.
            extra_compile_args=["-O2", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        ),
        Extension(
            "rankway._steps",
            ["src/rankway/_steps.c"],
            extra_compile_args=["-O2", "-fvisibility=hidden"],
            optional=True,
        ),
    ]
)
