#!/bin/sh
# Classifies one handwritten digit with curl and nothing else. Start the server first: make run
# The picture is image 1750 of scikit-learn's digits, row by row: a three, and one of those that were held out from training.
set -eu
url=${1:-http://127.0.0.1:8000}

curl --silent --show-error --fail-with-body "$url/v2/models/digits/infer" --data '{
  "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [
     0,  0,  7, 16, 16, 15,  8,  0,
     0,  0, 12, 15, 15, 16, 11,  0,
     0,  0,  0,  3, 14, 15,  2,  0,
     0,  0,  1, 14, 12,  1,  0,  0,
     0,  0,  1, 16, 15,  5,  0,  0,
     0,  0,  0,  3, 12, 15,  0,  0,
     0,  0,  0,  4, 12, 14,  1,  0,
     0,  0, 10, 15, 10,  4,  0,  0]}],
  "outputs": [{"name": "logits", "parameters": {"classification": 1}}]
}'
echo
