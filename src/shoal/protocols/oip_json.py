"""The front door of the HTTP/JSON codec: all that a server of Open Inference Protocol over HTTP needs, in one import.

No code of its own. `oip_request.py` decodes heads, `oip_binary.py` cuts bodies, `oip_response.py` encodes answers.
"""

from __future__ import annotations

from shoal.protocols.limits import DEFAULT_LIMITS, Limits
from shoal.protocols.oip_binary import decode_raw, split_binary
from shoal.protocols.oip_head import InferHead, InputHead, OutputHead
from shoal.protocols.oip_request import decode_head
from shoal.protocols.oip_response import OutputTensor, encode_response

__all__ = [
    "DEFAULT_LIMITS",
    "InferHead",
    "InputHead",
    "Limits",
    "OutputHead",
    "OutputTensor",
    "decode_head",
    "decode_raw",
    "encode_response",
    "split_binary",
]
