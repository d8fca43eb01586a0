"""The weights of an EAGLE head as the kernels of a GPU read them."""

from __future__ import annotations

import torch

from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.heads.device_weights import DeviceWeights
from outrider.models.cuda.model import CudaLlama


class DeviceHead(DeviceWeights):
    def __init__(self, head: EagleHead, target: CudaLlama) -> None:
        super().__init__(head, target)
        config, first = head.config, head.decoder[0]
        self.entering = first.input_layernorm.weight.detach(), first.hidden_norm.weight.detach()
        norms = [gain.detach() for gain in head.fc_norm.parameters()] if config.norm_inputs else []
        self.input_norms = torch.stack(norms) if norms else None
        self.joined_norm = head.input_norm.weight.detach() if config.norm_joined else None
