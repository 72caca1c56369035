// Gather and scatter between pages and chunks: every plane of every page in one launch.
//
//   unit   some pieces of one page of one plane; `group` threads copy it
//   piece  bytes that lie together on both sides; some of these threads, its lanes, copy it
//
// Units go plane by plane, page by page, part by part, as a chunk does: neighbours write neighbours.
#include "common.cuh"

// As launch.py lays it out, one for each plane.
struct Plane {
  u64 address;       // of page 0
  u64 page_stride;
  u64 row_stride;    // between rows of `row_pieces` pieces
  u64 piece_stride;  // within a row
  u64 row_pieces;
  u64 num_pieces;    // of a page
  u64 piece_bytes;   // but for the last, which ends with the page
  u64 page_bytes;
  u64 part_pieces;   // of a unit
  u64 lanes;         // of a piece, a power of two that divides `group`
  u64 offset;        // in a chunk, for each of its pages
};

template <bool to_chunks>
static __device__ __forceinline__ void copy_unit(
    const Plane& plane, u64 page, u8* packed, u64 part, u64 thread, u64 group) {
  u8* memory = (u8*)(plane.address + page * plane.page_stride);
  u64 stop = (part + 1) * plane.part_pieces;
  if (stop > plane.num_pieces) stop = plane.num_pieces;
  u64 lane = thread & (plane.lanes - 1), step = divided(group, plane.lanes);
  for (u64 i = part * plane.part_pieces + divided(thread, plane.lanes); i < stop; i += step) {
    u64 row = divided(i, plane.row_pieces), start = i * plane.piece_bytes;
    u8* piece = memory + row * plane.row_stride + (i - row * plane.row_pieces) * plane.piece_stride;
    u64 bytes = plane.page_bytes - start;
    if (bytes > plane.piece_bytes) bytes = plane.piece_bytes;
    if (to_chunks) copy_bytes(packed + start, piece, bytes, lane, plane.lanes);
    else copy_bytes(piece, packed + start, bytes, lane, plane.lanes);
  }
}

// words: `num_planes` planes, then `num_pages` page numbers, then as many places.
// num_parts: units of a page, of the plane that has most; `group` divides the block.
template <bool to_chunks>
static __device__ __forceinline__ void copy_pages(
    const u64* words, u64 num_planes, u64 num_pages, u64 num_parts, u64 chunks, u64 chunk_stride,
    u64 pages_per_chunk, u64 group) {
  const Plane* planes = (const Plane*)words;
  const u64* pages = (const u64*)(planes + num_planes);
  const u64* places = pages + num_pages;
  u64 thread = threadIdx.x & (group - 1), groups = divided(blockDim.x, group);
  u64 num_units = num_planes * num_pages * num_parts;
  for (u64 unit = blockIdx.x * groups + divided(threadIdx.x, group); unit < num_units;
       unit += gridDim.x * groups) {
    u64 one_page = divided(unit, num_parts), number = divided(one_page, num_pages);
    u64 i = one_page - number * num_pages, part = unit - one_page * num_parts;
    const Plane& plane = planes[number];
    u64 chunk = divided(places[i], pages_per_chunk), place = places[i] - chunk * pages_per_chunk;
    u8* packed = (u8*)(chunks + chunk * chunk_stride + plane.offset * pages_per_chunk);
    copy_unit<to_chunks>(plane, pages[i], packed + place * plane.page_bytes, part, thread, group);
  }
}

extern "C" __global__ void gather(
    const u64* words, u64 num_planes, u64 num_pages, u64 num_parts, u64 chunks, u64 chunk_stride,
    u64 pages_per_chunk, u64 group) {
  copy_pages<true>(
      words, num_planes, num_pages, num_parts, chunks, chunk_stride, pages_per_chunk, group);
}

extern "C" __global__ void scatter(
    const u64* words, u64 num_planes, u64 num_pages, u64 num_parts, u64 chunks, u64 chunk_stride,
    u64 pages_per_chunk, u64 group) {
  copy_pages<false>(
      words, num_planes, num_pages, num_parts, chunks, chunk_stride, pages_per_chunk, group);
}
