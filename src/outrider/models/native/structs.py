"""The C structures of kernels.cpp, in the same order."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class Matrix(Structure):
    _fields_ = (
        ("records", c_void_p),
        ("super_scales", c_void_p),
        ("super_minimums", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("bits", c_int32),
        ("zero", c_int32),
        ("group", c_int32),
        ("minimums", c_int32),
    )


class JoinedMatrices(Structure):
    _fields_ = (("parts", Matrix * 3), ("count", c_int64), ("outputs", c_int64), ("activations", c_int64))


class LayerStruct(Structure):
    _fields_ = (
        ("qkv", JoinedMatrices),
        ("output", JoinedMatrices),
        ("gate_up", JoinedMatrices),
        ("down", JoinedMatrices),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("large", c_void_p),
    )


class SpanStruct(Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("values", c_int64),
        ("head_stride", c_int64),
        ("layer_stride", c_int64),
        ("start", c_int64),
        ("first", c_int64),
        ("rows", c_int64),
    )


class ShapeStruct(Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("layers", c_int64),
        ("window", c_int64),
        ("kv_bits", c_int64),
        ("eps", c_float),
    )


class Work(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("scale", c_void_p),
        ("sums", c_void_p),
        ("amx", c_void_p),
        ("gated_q", c_void_p),
        ("gated_scale", c_void_p),
        ("gated_sums", c_void_p),
        ("gated_amx", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("inner", c_void_p),
        ("scores", c_void_p),
        ("wide", c_void_p),
        ("asked", c_void_p),
        ("places", c_void_p),
        ("seen", c_void_p),
        ("runs", c_void_p),
        ("owners", c_void_p),
        ("longest", c_int64),
    )


class AdapterPart(Structure):
    _fields_ = (("b", c_void_p), ("first", c_int64), ("outputs", c_int64), ("low", c_int64), ("rank", c_int64))


class AdapterMatrix(Structure):
    _fields_ = (
        ("a", c_void_p),
        ("scales", c_void_p),
        ("rank", c_int64),
        ("count", c_int64),
        ("parts", AdapterPart * 3),
    )


class AdapterLayer(Structure):
    _fields_ = (
        ("qkv", AdapterMatrix),
        ("output", AdapterMatrix),
        ("gate_up", AdapterMatrix),
        ("down", AdapterMatrix),
    )


class Adapters(Structure):
    _fields_ = (("rows", c_void_p), ("low", c_void_p), ("stride", c_int64))


class HeadInputs(Structure):
    _fields_ = (
        ("embedded", c_void_p),
        ("embedding_norm", c_void_p),
        ("replaces", c_int64),
        ("trails", c_void_p),
        ("length", c_int64),
        ("seen", c_void_p),
        ("last", c_int64),
    )


class HeadStruct(Structure):
    _fields_ = (
        ("fc", JoinedMatrices),
        ("output", JoinedMatrices),
        ("embedding", c_void_p),
        ("input_norms", c_void_p),
        ("joined_norm", c_void_p),
        ("embedding_norm", c_void_p),
        ("norm", c_void_p),
        ("ids", c_void_p),
        ("tokens", c_int64),
        ("blocks", c_int64),
        ("norm_residual", c_int32),
        ("norm_output", c_int32),
    )


class PassStruct(Structure):
    _fields_ = (
        ("shape", c_void_p),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("output", c_void_p),
        ("norm", c_void_p),
        ("spans", c_void_p),
        ("span_count", c_int64),
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("parents", c_void_p),
        ("wanted", c_void_p),
        ("wanted_count", c_int64),
        ("kept", c_void_p),
        ("judged", c_void_p),
        ("x", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("work", c_void_p),
        ("adapters", c_void_p),
        ("threads", c_int64),
    )


class GrowthStruct(Structure):
    _fields_ = (
        ("depth", c_int64),
        ("width", c_int64),
        ("heat", c_float),
        ("less", c_float),
        ("stop", c_float),
        ("least", c_float),
    )
