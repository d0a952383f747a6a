"""Generates the stubs from ../../proto while the package is built, so that none are kept in the repository."""
import pathlib

import google.protobuf
import grpc_tools
from grpc_tools import protoc
from importlib import metadata
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE.parent.parent / "proto"


class BuildWithStubs(build_py):
    def run(self):
        super().run()
        sources = sorted(PROTO.glob("coppice/v1/*.proto"))
        if not sources:
            raise SystemExit(f"no .proto files under {PROTO}: install from a checkout of the repository")
        include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        code = protoc.main(
            ["protoc", f"-I{PROTO}", f"-I{include}", f"--python_out={self.build_lib}",
             f"--grpc_python_out={self.build_lib}"] + [str(s) for s in sources])
        if code != 0:
            raise SystemExit("generating the stubs failed")
        (pathlib.Path(self.build_lib) / "coppice" / "v1" / "__init__.py").touch()


setup(
    name="coppice-client",
    version="0.1.0",
    description="Python client of a Coppice cluster",
    license="Apache-2.0",
    python_requires=">=3.9",
    packages=["coppice"],
    # The generated code wants a runtime no older than its generator.
    install_requires=[f"grpcio>={metadata.version('grpcio-tools')}", f"protobuf>={google.protobuf.__version__}"],
    cmdclass={"build_py": BuildWithStubs},
)
