"""`kvcairn demo`: a long prompt computed once, then loaded from memory, from disk in a new process, and after damage.

    rows = demo.run(emit=print)
    console.print(demo.table(rows))

Importing this package loads no torch; `run` does.
"""

from kvcairn.demo.rows import Row, table
from kvcairn.demo.steps import run

__all__ = ["Row", "run", "table"]
