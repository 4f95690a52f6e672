"""Mutual proof that both ends of a connection know a key, which never travels.

The connecting side sends a nonce. The listening side answers with its own nonce and a proof, the HMAC of both nonces
under the key. The connecting side checks it before it sends anything else. From then on each message has an HMAC under
a key of this connection alone, over the direction, the number of the message and its content: a message of another
connection, a repeated one or one of the other direction is refused. The scope, e.g. the name of a run, goes into all
of them: processes of another run do not take each other for their own.
"""

from __future__ import annotations

import hmac
import re
import secrets

NONCE_BYTES = 32
_HEX = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


class WrongProof(ConnectionError):
    """The other side does not know the key, or speaks about something else."""


class ProofSession:
    """The proofs of the messages of one connection: `sign` in one direction, `accepts` in the other."""

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        self._key = key
        self._own = own
        self._other = other
        self._sent = self._received = 0

    def sign(self, *parts: bytes) -> str:
        """The proof of the next message that is sent."""
        self._sent += 1
        return _mac(self._key, self._own, str(self._sent).encode(), *parts)

    def accepts(self, proof: object, *parts: bytes) -> bool:
        """Whether the next message that arrives has its proof."""
        self._received += 1
        expected = _mac(self._key, self._other, str(self._received).encode(), *parts)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(expected, proof)


class Challenge:
    """The connecting side's part of the proof."""

    def __init__(self, key: str, scope: str = "") -> None:
        self._key = key.encode()
        self._scope = scope.encode()
        self.nonce = secrets.token_hex(NONCE_BYTES)

    def session(self, nonce: object, proof: object) -> ProofSession:
        """The session with a listener that answered so. Raises WrongProof if it does not know the key."""
        if not is_nonce(nonce) or not isinstance(proof, str) or not proof.isascii():
            raise WrongProof("it does not prove that it knows the key")
        nonces = self._scope, self.nonce.encode(), str(nonce).encode()
        if not hmac.compare_digest(_mac(self._key, b"listener knows the key", *nonces), proof):
            raise WrongProof("it has another key, or belongs to another run")
        return ProofSession(bytes.fromhex(_mac(self._key, b"connection", *nonces)), b"client", b"listener")


def answer_challenge(key: str, client_nonce: object, scope: str = "") -> tuple[dict[str, str], ProofSession]:
    """The listening side's answer to a nonce, and the session; the client's first message is its own proof.

    Raises WrongProof for what is no nonce.
    """
    if not is_nonce(client_nonce):
        raise WrongProof("expected a nonce")
    nonce = secrets.token_hex(NONCE_BYTES)
    nonces = scope.encode(), str(client_nonce).encode(), nonce.encode()
    answer = {"nonce": nonce, "proof": _mac(key.encode(), b"listener knows the key", *nonces)}
    return answer, ProofSession(bytes.fromhex(_mac(key.encode(), b"connection", *nonces)), b"listener", b"client")


def is_nonce(value: object) -> bool:
    """Whether a value is a nonce in hexadecimal digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _mac(key: bytes, *parts: bytes) -> str:
    """HMAC-SHA-256 over parts, each with its length so that they cannot be divided in another way."""
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, content, "sha256").hex()
