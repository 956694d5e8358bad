#!/bin/sh
# Classifies one handwritten digit with curl and nothing else. Start the server first: make run
# The picture is image 1347 of scikit-learn's digits (a three), row by row. `classification: 1` asks for the best class only.
set -eu
url=${1:-http://127.0.0.1:8000}

curl --silent --show-error --fail-with-body "$url/v2/models/digits/infer" --data '{
  "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [
     0,  0,  7, 16, 16, 14,  0,  0,
     0,  0, 16, 12, 10, 15,  1,  0,
     0,  0, 10,  4, 16, 10,  0,  0,
     0,  0,  0,  9, 16, 11,  1,  0,
     0,  0,  0,  0,  7, 16,  8,  0,
     0,  0,  0,  0,  0, 16,  7,  0,
     0,  0,  8,  4, 10, 15,  2,  0,
     0,  0, 12, 16, 16,  6,  0,  0]}],
  "outputs": [{"name": "logits", "parameters": {"classification": 1}}]
}'
echo
