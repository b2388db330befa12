"""What a Triton kernel is compiled to for a GPU that need not be there: in a process of its own, because the tests' own
Triton interprets.

    python -m tests.support.assembly MODULE KERNEL SPEC     SPEC: JSON, as `compiled_kernel` is given it
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)")  # cuobjdump's; what is spilled lies in the stack


def compiled_kernel(
    module: str, kernel: str, arguments: dict[str, str], constants: dict[str, Any], capability: int = 90, **options: int
) -> dict[str, Any]:
    """For a compute capability: PTX, `shared` (bytes of a program), `registers`, `stack` and `local` (of a thread).

    `arguments`: Triton's types; of pointers, addresses are multiples of 16. `options`: num_warps and num_stages.
    """
    spec = {"arguments": arguments, "constants": constants, "options": options, "capability": capability}
    command = [sys.executable, "-m", "tests.support.assembly", module, kernel, json.dumps(spec)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(module: str, kernel: str, spec: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, given = getattr(importlib.import_module(module), kernel), json.loads(spec)
    constants, arguments = given["constants"], given["arguments"]
    place = {name: (function.arg_names.index(name),) for name in function.arg_names}
    source = ASTSource(
        function,
        arguments | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name, kind in arguments.items() if kind.startswith("*")},
    )
    made = triton.compile(source, target=GPUTarget("cuda", given["capability"], 32), options=given["options"])
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        listed = subprocess.run([reader, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = USAGE.search(listed)
    assert found is not None, listed
    usage = dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))
    print(json.dumps({"ptx": made.asm["ptx"], "shared": made.metadata.shared, **usage}))


if __name__ == "__main__":
    main(*sys.argv[1:])
