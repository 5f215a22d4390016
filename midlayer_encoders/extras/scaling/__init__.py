"""Run units of work on many processes and machines, through executors of existing engines.

A unit is a small object that can be pickled, writes its own files into a folder that all machines share, and is done
when they are there. An executor is anything with ``submit(function, *arguments)`` that returns something with
``result()``: of ``concurrent.futures``, submitit, Dask, or Ray through :class:`RayExecutor`.
"""

from midlayer_encoders.extras.scaling.executors import Processes, RayExecutor, open_executor

__all__ = ["Processes", "RayExecutor", "open_executor"]
