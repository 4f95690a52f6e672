"""Mutual proof that both sides of a connection know a key. The key itself is never sent.

1. The client, the side that connects, sends a nonce: random hexadecimal digits.
2. The listener answers with its own nonce and a proof, the HMAC of both nonces under the key.
3. The client checks the proof before it sends anything else.
4. From then on, each message has an HMAC under a key of this connection only. It covers the direction, the number of
   the message and its content. A message from another connection, a repeated one, or one of the other direction is
   refused.

A scope, for example the name of a run, is part of every HMAC. So processes of different runs never accept each other.
"""

from __future__ import annotations

import hmac
import re
import secrets

NONCE_BYTES = 32
"""Random bytes of a nonce."""
_HEX = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


class WrongProof(ConnectionError):
    """The other side does not know the key, or belongs to another scope."""


class ProofSession:
    """Proofs of the messages of one connection: `sign` for messages that are sent, `accepts` for those that arrive."""

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        """`key` is the key of this connection only.

        `own` and `other` are the names of the two sides, `client` and `listener`.
        """
        self._key = key
        self._own = own
        self._other = other
        self._sent = self._received = 0

    def sign(self, *parts: bytes) -> str:
        """Return the proof of the next message that is sent. `parts` are its content."""
        self._sent += 1
        return _mac(self._key, self._own, str(self._sent).encode(), *parts)

    def accepts(self, proof: object, *parts: bytes) -> bool:
        """Whether `proof` is right for the next message that arrives. `parts` are its content."""
        self._received += 1
        expected = _mac(self._key, self._other, str(self._received).encode(), *parts)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(expected, proof)


class Challenge:
    """The client's part of the proof. `nonce` is what it sends first."""

    def __init__(self, key: str, scope: str = "") -> None:
        """`key` is the shared key. `scope` is what both sides must agree on, for example the name of a run."""
        self._key = key.encode()
        self._scope = scope.encode()
        self.nonce = secrets.token_hex(NONCE_BYTES)

    def session(self, nonce: object, proof: object) -> ProofSession:
        """Return the session with a listener that answered with `nonce` and `proof`.

        Raises WrongProof if it does not know the key.
        """
        if not is_nonce(nonce) or not isinstance(proof, str) or not proof.isascii():
            raise WrongProof("it does not prove that it knows the key")
        nonces = self._scope, self.nonce.encode(), str(nonce).encode()
        if not hmac.compare_digest(_mac(self._key, b"listener knows the key", *nonces), proof):
            raise WrongProof("it has another key, or belongs to another run")
        return ProofSession(bytes.fromhex(_mac(self._key, b"connection", *nonces)), b"client", b"listener")


def answer_challenge(key: str, client_nonce: object, scope: str = "") -> tuple[dict[str, str], ProofSession]:
    """Return the listener's answer to a client's nonce, and the session. `scope` must be the client's.

    The client proves that it knows the key with the proof of its first message. Raises WrongProof if `client_nonce` is
    no nonce.
    """
    if not is_nonce(client_nonce):
        raise WrongProof("expected a nonce")
    nonce = secrets.token_hex(NONCE_BYTES)
    nonces = scope.encode(), str(client_nonce).encode(), nonce.encode()
    answer = {"nonce": nonce, "proof": _mac(key.encode(), b"listener knows the key", *nonces)}
    return answer, ProofSession(bytes.fromhex(_mac(key.encode(), b"connection", *nonces)), b"listener", b"client")


def is_nonce(value: object) -> bool:
    """Whether a value is a nonce: a text of 64 hexadecimal digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _mac(key: bytes, *parts: bytes) -> str:
    """Return the HMAC-SHA-256 over `parts` as hexadecimal digits.

    Each part is preceded by its length, so that no other division into parts gives the same HMAC.
    """
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, content, "sha256").hex()
