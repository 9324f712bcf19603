"""Export to ONNX: the graphs of encoding and decoding, their conversion, and the certificate."""
