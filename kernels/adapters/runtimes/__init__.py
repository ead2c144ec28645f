"""Runtimes that run models on a CPU: ONNX Runtime and OpenVINO."""
