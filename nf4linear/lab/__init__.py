"""The dequantize laboratory: the published ladder of kernels V0..V3 and ours, V4, generated, tested and measured.

Each module is one step: weight_file (the binary file), generate, program (build and run the stand-alone C++ program),
verify (against the reference output), bench (ladder, interactions, sizes), tables (Markdown, JSON, PNG), profile (ncu).
The kernels are in csrc/lab; docs/dequantize.md tells the story.
"""
