"""A digest of the weights of a module, equal on every device."""

import hashlib

import torch
from torch import Tensor, nn

_CHUNK = 1 << 20


def weights_digest(module: nn.Module) -> str:
    """Return twelve hexadecimal digits that identify the weights on every device.

    The integers of each tensor are summed on its device with weights by position, modulo :math:`2^{64}`, in one pass
    over memory.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = weights_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> before == weights_digest(layer)
        False
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(str(tensor_checksum(tensor)).encode())
    return digest.hexdigest()


def tensor_checksum(tensor: Tensor) -> int:
    """Return the sum of the integers of a tensor with weights by position, modulo :math:`2^{64}`."""
    # Eight bytes are read as two integers: the low bits of round numbers are zero, and a sum of such multiples of 2^52
    # modulo 2^64 would lose information.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().flatten().view(integers)
    positions = torch.arange(1, min(_CHUNK, max(flat.numel(), 1)) + 1, device=flat.device) * 2654435761 + 12345
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        total = total * 6364136223846793005 + number + (chunk.long() * positions[: chunk.numel()]).sum()
    return int(total)
