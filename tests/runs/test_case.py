"""A case survives being printed and saved, and a file that is not a case is refused."""

import subprocess
import sys


def test_case_is_importable_without_torch_and_triton() -> None:
    program = "import sys, strategies.case; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
