"""Tools for any model: the cost of its modules, the origin of NaN, and replacement of modules.

Read in this order.

Values          nested (the tensors inside tuples, dicts and dataclasses).
Traces          undisturbed (runs that leave random states, buffers and modes as they were).
Cost            module_profiler (time and memory of every module), recompute (which modules to
                checkpoint for a memory limit), activation_offload (saved tensors in host memory).
Numbers         debug_nan (the first module with NaN or Inf).
Replacement     module_replace (modules by rule), int8_linear (int8 layers for nn.Linear).
Profilers       ranges (named ranges, profiler on and off), printing (printing on one rank).
"""
