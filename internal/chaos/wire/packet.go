package wire

import "encoding/binary"

// packet is one Ethernet frame with a whole IPv4 packet in it; the slices alias it. tcp is nil for other
// protocols and for fragments.
type packet struct {
	frame   []byte
	ip      []byte // the IPv4 header
	tcp     []byte // header and payload
	payload []byte
}

const (
	etherLen  = 14
	protoTCP  = 6
	flagACK   = 0x10
	flagRST   = 0x04
	flagFIN   = 0x01
	flagSYN   = 0x02
	minIPv4   = 20
	minTCP    = 20
	checksum4 = 10 // offset in the IPv4 header
	checksumT = 16 // offset in the TCP header
)

// parsePacket reads a frame; ok is false if it is no IPv4 packet or is cut off.
func parsePacket(frame []byte) (p packet, ok bool) {
	if len(frame) < etherLen+minIPv4 || binary.BigEndian.Uint16(frame[12:]) != 0x0800 {
		return p, false
	}
	b := frame[etherLen:]
	head, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if b[0]>>4 != 4 || head < minIPv4 || total < head || total > len(b) {
		return p, false
	}
	p.frame, p.ip = frame[:etherLen+total], b[:head]
	fragment := binary.BigEndian.Uint16(b[6:])&0x3fff != 0
	if seg := b[head:total]; b[9] == protoTCP && !fragment && len(seg) >= minTCP {
		if off := int(seg[12]>>4) * 4; off >= minTCP && off <= len(seg) {
			p.tcp, p.payload = seg, seg[off:]
		}
	}
	return p, true
}

// destination is the IPv4 address that the packet is for.
func (p *packet) destination() [4]byte { return [4]byte(p.ip[16:20]) }

// ports of a TCP packet; zeros for others.
func (p *packet) ports() (src, dst uint16) {
	if p.tcp == nil {
		return 0, 0
	}
	return binary.BigEndian.Uint16(p.tcp), binary.BigEndian.Uint16(p.tcp[2:])
}

// corrupt changes payload byte at by the bits of mask, which is not 0, and makes the checksum right again.
func (p *packet) corrupt(at int, mask byte) {
	p.payload[at] ^= mask
	p.sign()
}

// sign computes both checksums.
func (p *packet) sign() {
	binary.BigEndian.PutUint16(p.ip[checksum4:], 0)
	binary.BigEndian.PutUint16(p.ip[checksum4:], fold(sum(0, p.ip)))
	if p.tcp == nil {
		return
	}
	binary.BigEndian.PutUint16(p.tcp[checksumT:], 0)
	binary.BigEndian.PutUint16(p.tcp[checksumT:], fold(sum(p.pseudo(), p.tcp)))
}

// pseudo is the sum over TCP's pseudo header.
func (p *packet) pseudo() uint32 { return sum(uint32(protoTCP)+uint32(len(p.tcp)), p.ip[12:20]) }

// sum adds b's 16-bit words to acc.
func sum(acc uint32, b []byte) uint32 {
	for ; len(b) >= 2; b = b[2:] {
		acc += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		acc += uint32(b[0]) << 8
	}
	return acc
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// resets forges the end of p's connection: one reset for its receiver, in p's place, and one for its
// sender. There is none for a packet that is a reset itself or no TCP.
func (p *packet) resets() (onward, back []byte) {
	if p.tcp == nil || p.tcp[13]&flagRST != 0 {
		return nil, nil
	}
	seq, ack := p.tcp[4:8], p.tcp[8:12]
	after := binary.BigEndian.Uint32(seq) + uint32(len(p.payload))
	if p.tcp[13]&(flagFIN|flagSYN) != 0 {
		after++
	}
	onward = p.reset(false, binary.BigEndian.Uint32(seq), 0)
	back = p.reset(true, binary.BigEndian.Uint32(ack), after)
	return onward, back
}

// reset is a frame of p's connection with nothing but a reset in it; ack 0: none.
func (p *packet) reset(turn bool, seq, ack uint32) []byte {
	out := make([]byte, etherLen+minIPv4+minTCP)
	copy(out, p.frame[:etherLen])
	ip, tcp := out[etherLen:etherLen+minIPv4], out[etherLen+minIPv4:]
	copy(ip, p.ip[:minIPv4])
	ip[0] = 4<<4 | minIPv4/4
	binary.BigEndian.PutUint16(ip[2:], minIPv4+minTCP)
	copy(tcp[:4], p.tcp[:4])
	if turn {
		copy(ip[12:16], p.ip[16:20])
		copy(ip[16:20], p.ip[12:16])
		copy(tcp[0:2], p.tcp[2:4])
		copy(tcp[2:4], p.tcp[0:2])
	}
	binary.BigEndian.PutUint32(tcp[4:], seq)
	tcp[12], tcp[13] = minTCP/4<<4, flagRST
	if ack != 0 {
		binary.BigEndian.PutUint32(tcp[8:], ack)
		tcp[13] |= flagACK
	}
	q := packet{frame: out, ip: ip, tcp: tcp}
	q.sign()
	return out
}
